// Operators. Views and memory are our own; everything else runs the CPU's kernel on the same bytes, between telling the
// race checker what it reads and what it writes. FAKEACC_NO_SET_DATA=1 refuses `cpu_tensor.data = device_tensor`.
#include "ops.h"

#include "device.h"
#include "memory.h"
#include "race.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace fakeacc {

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  void* bytes = tensor.numel() ? tensor.data_ptr() : nullptr;
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  return at::from_blob(bytes, tensor.sizes(), tensor.strides(), [keep = tensor](void*) {}, options, at::kCPU);
}

const void* block_of(const at::Tensor& tensor) {
  const bool ours = tensor.defined() && tensor.is_privateuseone() && tensor.has_storage();
  return ours ? tensor.storage().data() : nullptr;
}

namespace {

// Inside the CPU's kernel its own copies and reads are no work of the device.
thread_local bool inside_kernel = false;
struct InsideKernel {
  bool outer = std::exchange(inside_kernel, true);
  ~InsideKernel() { inside_kernel = outer; }
};

// ---- memory ----------------------------------------------------------------------------------------------------------

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, device_memory(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, device_memory(), kKeys, c10::dtype_or_default(dtype));
}

void order(Stream first, Stream then) {
  race::begin(first);
  race::join(then, race::clock_of(first));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (!inside_kernel) {
    c10::DeviceGuard guard(source.is_privateuseone() ? source.device() : target.device());
    const Stream here = current_stream();
    // As CUDA: a copy between devices runs on the source's stream, and the target's stream waits before and after it.
    const bool crosses = source.is_privateuseone() && target.is_privateuseone() && source.device() != target.device();
    const Stream there = crosses ? current_stream_of(target.get_device()) : here;
    note("copy");
    if (crosses) order(there, here);
    race::begin(here);
    race::access(block_of(source), here, false, "copy");
    race::access(block_of(target), here, true, "copy");
    if (crosses) order(here, there);
    if (!non_blocking && source.is_cpu() != target.is_cpu()) race::host_waits_for(here);
  }
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor& tensor) {
  if (!inside_kernel) {
    c10::DeviceGuard guard(tensor.device());
    note("item");
    race::begin(current_stream());
    race::access(block_of(tensor), current_stream(), false, "item");
    race::host_waits_for(current_stream());
  }
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  const Stream key{stream.device_index(), stream.id()};
  note("record_stream", key);
  race::keep_for(block_of(tensor), key);
}

// Growth is our own allocation, not the CPU kernel's: that one knows neither the tensor's device nor the checker.
const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(tensor.device());
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t needed =
      at::detail::computeStorageNbytesContiguous(sizes, tensor.dtype().itemsize(), tensor.storage_offset());
  if (tensor.storage().nbytes() < needed) resize_storage(tensor.storage(), needed);
  return at::native::resize_(tensor, sizes, format);
}

// ---- views: nothing moves --------------------------------------------------------------------------------------------

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(tensor, size, stride, offset);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source) { return at::native::set_(tensor, source); }

at::Tensor& set_storage_part(at::Tensor& tensor, at::Storage source, int64_t offset, c10::IntArrayRef size,
                             c10::IntArrayRef stride) {
  return at::cpu::set_(tensor, source, offset, size, stride);
}

bool has_compatible_shallow_copy_type(const at::Tensor& tensor, const at::Tensor& other) {
  static const bool strict = setting("FAKEACC_NO_SET_DATA", 0);
  return !strict || tensor.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(other.key_set());
}

// ---- everything else -------------------------------------------------------------------------------------------------

template <class Function>
void each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) function(*tensor);
    }
  }
}

// The stream an operator runs on: the current one of its tensors' device.
Stream stream_for(const torch::jit::Stack& stack, size_t num_arguments) {
  Stream stream = current_stream();
  for (size_t i = stack.size() - num_arguments; i < stack.size(); i++) {
    each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (tensor.is_privateuseone()) stream = current_stream_of(tensor.get_device());
    });
  }
  return stream;
}

void tell_arguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, Stream stream,
                    const std::string& name) {
  const auto& arguments = schema.arguments();
  const size_t first = stack.size() - arguments.size();
  race::begin(stream);
  for (bool writes : {false, true}) {  // an argument that is read and written is read first
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = arguments[i].alias_info();
      if ((alias && alias->isWrite()) != writes) continue;
      each_tensor(stack[first + i],
                  [&](const at::Tensor& tensor) { race::access(block_of(tensor), stream, writes, name); });
    }
  }
}

bool holds_tensors(const c10::IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList() || value.isNone();
}

void tell_results(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, Stream stream,
                  const std::string& name) {
  const auto& results = schema.returns();
  const size_t first = stack.size() - results.size();
  for (size_t i = 0; i < results.size(); i++) {
    if (results[i].alias_info()) continue;  // told as an argument
    if (!holds_tensors(stack[first + i])) race::host_waits_for(stream);  // a number for the host, as of `equal`
    each_tensor(stack[first + i],
                [&](const at::Tensor& tensor) { race::access(block_of(tensor), stream, true, name); });
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool outer = !inside_kernel;
  const bool told = outer && race::is_on();
  const std::string name = outer ? op.operator_name().name : "";
  const Stream stream = told ? stream_for(*stack, op.schema().arguments().size()) : current_stream();
  if (outer) note(name, stream);
  if (told) tell_arguments(op.schema(), *stack, stream, name);
  {
    InsideKernel inside;
    at::native::cpu_fallback(op, stack);
  }
  if (told) tell_results(op.schema(), *stack, stream, name);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("record_stream", record_stream);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize_);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_part);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the macro wants the name `m`; enough operators for tests
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
}

}  // namespace fakeacc
