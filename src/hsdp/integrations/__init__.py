"""hsdp inside the trainers that people use; each module needs the library that it is named after."""
