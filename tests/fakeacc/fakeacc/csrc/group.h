// The process-group backend "fakeccl".
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fakeacc {

// A backend for device tensors over `inner`, which carries the same bytes as CPU tensors (gloo).
c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> inner, std::chrono::milliseconds timeout);

// For tests of the race checker: the `number`-th `wait()` of a work from here on orders no streams; the host waits as
// ever. -1: none. Counting starts anew.
void skip_wait(int64_t number);
int64_t num_waits();

}  // namespace fakeacc
