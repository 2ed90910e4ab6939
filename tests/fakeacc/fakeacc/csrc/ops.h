// Tensors of the device, seen as tensors on the CPU over the same bytes.
#pragma once

#include <ATen/core/Tensor.h>

namespace fakeacc {

at::Tensor on_host(const at::Tensor& tensor);

// The block of memory a tensor lies in; null for what is not on the device.
const void* block_of(const at::Tensor& tensor);

}  // namespace fakeacc
