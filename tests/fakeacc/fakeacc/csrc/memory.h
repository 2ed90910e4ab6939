// Device memory, which is host memory full of NaN until something is written; and pinned host memory.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace fakeacc {

c10::Allocator* device_memory();
c10::Allocator* pinned_memory();
bool is_pinned(const void* pointer);

// FSDP frees and restores the storages of parameters by it; ours does too.
void resize_storage(const c10::Storage& storage, size_t num_bytes);

}  // namespace fakeacc
