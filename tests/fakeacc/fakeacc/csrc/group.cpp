// "fakeccl": collectives of device tensors. gloo moves the same bytes, seen as CPU tensors; for the race checker every
// group has a stream of its own, as with NCCL: a collective first waits for the current stream, `wait()` lets the
// current stream wait for it. FAKECCL_NO_COALESCED=1 is a backend without the grouped collectives.
#include "group.h"

#include "device.h"
#include "ops.h"
#include "race.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <mutex>

namespace fakeacc {

namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int64_t kFirstGroupStream = 1'000'000;  // far from those that c10 is asked for

std::atomic<int64_t> num_groups{0};
std::atomic<int64_t> num_waits_so_far{0};
std::atomic<int64_t> skipped_wait{-1};  // which of the waits orders nothing; none where negative

c10::Stream stream_of(Stream stream) {
  const c10::Device device(kType, static_cast<c10::DeviceIndex>(stream.first));
  return c10::Stream(c10::Stream::UNSAFE, device, stream.second);
}

Tensors on_host(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(fakeacc::on_host(tensor));
  return result;
}

TensorLists on_host(const TensorLists& lists) {
  TensorLists result;
  for (const auto& list : lists) result.push_back(on_host(list));
  return result;
}

Tensors flat(const TensorLists& lists) {
  Tensors result;
  for (const auto& list : lists) result.insert(result.end(), list.begin(), list.end());
  return result;
}

// gloo's work, with results on the device and their place in the order of streams.
struct GroupWork final : c10d::Work {
  WorkPtr inner;
  Tensors outputs, inputs;  // alive until it ends
  race::Clock end;          // of the group's stream
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool completes_in_wait = false;
  std::recursive_mutex mutex;  // what waits for the future may wait for the work again
  bool ended = false;

  GroupWork(WorkPtr work, Tensors results, Tensors sources, c10::Device device, race::Clock clock)
      : inner(std::move(work)), outputs(std::move(results)), inputs(std::move(sources)), end(std::move(clock)) {
    future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    auto finish = [future = future, outputs = outputs, end = end, device](c10::ivalue::Future& done) {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
      } else {
        complete(*future, outputs, end, device);
      }
    };
    try {
      inner->getFuture()->addCallback(finish);
    } catch (const c10::Error&) {  // gloo has none for reduce_scatter, send and recv
      completes_in_wait = true;
    }
  }

  // The future's event is recorded on a stream that has come exactly as far as this work: the group's own may be
  // further by now, the current one may not know of the work.
  static void complete(
      c10::ivalue::Future& future, const Tensors& outputs, const race::Clock& end, c10::Device device) {
    const Stream finish = new_stream(device.index());
    race::join(finish, end);
    c10::StreamGuard guard(stream_of(finish));
    future.markCompleted(c10::IValue(outputs));
  }

  bool wait(std::chrono::milliseconds timeout) override {
    note("work_wait");
    const bool skipped = num_waits_so_far++ == skipped_wait;
    const bool result = host_wait(timeout);
    if (!skipped) race::join(current_stream(), end);
    return result;
  }
  // Once: gloo's reduce_scatter writes its output in `wait`, each time it is called.
  bool host_wait(std::chrono::milliseconds timeout) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (ended) return true;
    const bool result = inner->wait(timeout);
    ended = true;
    if (completes_in_wait) complete(*future, outputs, end, future->devices()[0]);
    return result;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (completes_in_wait) host_wait(kNoTimeout);
    return future;
  }
};

struct Group final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;
  c10::intrusive_ptr<Options> options;
  const int64_t number = num_groups++;

  Group(c10::intrusive_ptr<c10d::Backend> backend, std::chrono::milliseconds timeout)
      : Backend(backend->getRank(), backend->getSize()),
        inner(std::move(backend)),
        options(c10::make_intrusive<Options>("fakeccl", timeout)) {}

  const std::string getBackendName() const override { return "fakeccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  bool supportsCoalescing() const override { return false; }

  static const Tensors& check(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_privateuseone(), "fakeccl: got a tensor on ", tensor.device(), ", takes fakeacc's only");
    }
    return tensors;
  }
  static const TensorLists& check(const TensorLists& lists) {
    for (const auto& list : lists) check(list);
    return lists;
  }

  // Wraps what gloo has started, and tells the race checker what the group's stream reads and writes.
  WorkPtr started(const char* name, Tensors outputs, Tensors inputs, WorkPtr work) {
    const std::string operation = std::string("ccl:") + name;
    note(operation);
    const Tensors& tensors = outputs.empty() ? inputs : outputs;
    const c10::Device device = tensors.empty() ? c10::Device(c10::kCPU) : tensors[0].device();
    race::Clock end;
    if (race::is_on() && !tensors.empty()) {
      const Stream here = current_stream();
      const Stream own{device.index(), kFirstGroupStream + number};
      race::begin(here);
      race::join(own, race::clock_of(here));
      race::begin(own);
      for (const auto& tensor : inputs) race::access(block_of(tensor), own, false, operation);
      for (const auto& tensor : outputs) race::access(block_of(tensor), own, true, operation);
      end = race::clock_of(own);
    }
    return c10::make_intrusive<GroupWork>(
        std::move(work), std::move(outputs), std::move(inputs), device, std::move(end));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto host = on_host(check(tensors));
    return started("allreduce", tensors, tensors, inner->allreduce(host, opts));
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    auto host = on_host(check(tensors));
    return started("allreduce_coalesced", tensors, tensors, inner->allreduce_coalesced(host, opts));
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto host = on_host(check(tensors));
    return started("broadcast", tensors, tensors, inner->broadcast(host, opts));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto host = on_host(check(tensors));
    return started("reduce", tensors, tensors, inner->reduce(host, opts));
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto to = on_host(check(outputs));
    auto from = on_host(check(inputs));
    return started("allgather", flat(outputs), inputs, inner->allgather(to, from, opts));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    check({output, input});
    auto to = fakeacc::on_host(output);
    auto from = fakeacc::on_host(input);
    return started("allgather_base", {output}, {input}, inner->_allgather_base(to, from, opts));
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    check_coalesced("allgather_into_tensor_coalesced");
    auto to = on_host(check(outputs));
    auto from = on_host(check(inputs));
    return started("allgather_coalesced", outputs, inputs, inner->allgather_into_tensor_coalesced(to, from, opts));
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto to = on_host(check(outputs));
    auto from = on_host(check(inputs));
    return started("reduce_scatter", outputs, flat(inputs), inner->reduce_scatter(to, from, opts));
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    check({output, input});
    auto to = fakeacc::on_host(output);
    auto from = fakeacc::on_host(input);
    return started("reduce_scatter_base", {output}, {input}, inner->_reduce_scatter_base(to, from, opts));
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    check_coalesced("reduce_scatter_tensor_coalesced");
    auto to = on_host(check(outputs));
    auto from = on_host(check(inputs));
    return started("reduce_scatter_coalesced", outputs, inputs, inner->reduce_scatter_tensor_coalesced(to, from, opts));
  }
  static void check_coalesced(const char* name) {
    TORCH_CHECK(!setting("FAKECCL_NO_COALESCED", 0), "Backend fakeccl does not support ", name);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) override {
    check({output, input});
    auto to = fakeacc::on_host(output);
    auto from = fakeacc::on_host(input);
    return started("alltoall", {output}, {input}, inner->alltoall_base(to, from, output_sizes, input_sizes, opts));
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    auto to = on_host(check(outputs));
    auto from = on_host(check(inputs));
    return started("alltoall", outputs, inputs, inner->alltoall(to, from, opts));
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto to = on_host(check(outputs));
    auto from = on_host(check(inputs));
    return started("gather", flat(outputs), inputs, inner->gather(to, from, opts));
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override {
    auto to = on_host(check(outputs));
    auto from = on_host(check(inputs));
    return started("scatter", outputs, flat(inputs), inner->scatter(to, from, opts));
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    auto host = on_host(check(tensors));
    return started("send", {}, tensors, inner->send(host, peer, tag));
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    auto host = on_host(check(tensors));
    return started("recv", tensors, {}, inner->recv(host, peer, tag));
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    note("ccl:barrier");
    return inner->barrier(opts);
  }
};

}  // namespace

int64_t num_waits() { return num_waits_so_far; }

void skip_wait(int64_t number) {
  num_waits_so_far = 0;
  skipped_wait = number;
}

c10::intrusive_ptr<c10d::Backend> make_group(
    c10::intrusive_ptr<c10d::Backend> inner, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<Group>(std::move(inner), timeout);
}

}  // namespace fakeacc
