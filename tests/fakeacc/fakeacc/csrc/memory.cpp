// See memory.h. The limit is FAKEACC_MIB (4096) a device; FAKEACC_NO_PINNED=1 is a device without pinned memory.
#include "memory.h"

#include "device.h"
#include "race.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace fakeacc {

namespace {

constexpr int kPoison = 0xFF;  // a NaN in every floating point dtype
constexpr size_t kAlignment = 64;

size_t limit_bytes() {
  static const size_t limit = static_cast<size_t>(setting("FAKEACC_MIB", 4096)) << 20;
  return limit;
}

struct DeviceMemory final : c10::DeviceAllocator {
  struct Block {
    void* bytes;
    size_t num_bytes;
    int device;
  };

  std::mutex mutex;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMaxDevices> stats;

  static DeviceMemory& get() {
    static auto* the = new DeviceMemory();  // never destroyed: tensors may die after static destructors ran
    return *the;
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    const int device = current_device();
    const c10::Device place(kType, static_cast<c10::DeviceIndex>(device));
    if (num_bytes == 0) return {nullptr, nullptr, [](void*) {}, place};
    take(device, num_bytes);
    void* bytes = nullptr;
    TORCH_CHECK(posix_memalign(&bytes, kAlignment, num_bytes) == 0, "fakeacc: no host memory left");
    race::allocated(bytes, current_stream());
    std::memset(bytes, kPoison, num_bytes);  // what was never written shows
    return {bytes, new Block{bytes, num_bytes, device}, &release, place};
  }

  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    race::freed(block->bytes);
    get().give_back(block->device, block->num_bytes);
    std::memset(block->bytes, kPoison, block->num_bytes);  // what is used after it was freed shows
    std::free(block->bytes);
    delete block;
  }

  void take(int device, size_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    auto& s = stats[device];
    TORCH_CHECK_WITH(
        OutOfMemoryError, s.allocated_bytes[0].current + num_bytes <= limit_bytes(), "fakeacc out of memory: device ",
        device, " holds ", s.allocated_bytes[0].current, " bytes of ", limit_bytes(), ", asked for ", num_bytes);
    for (auto* each : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes}) (*each)[0].increase(num_bytes);
    s.allocation[0].increase(1);
  }

  void give_back(int device, size_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    auto& s = stats[device];
    for (auto* each : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes}) (*each)[0].decrease(num_bytes);
    s.allocation[0].decrease(1);
  }

  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    race::keep_for(data.get(), {stream.device_index(), stream.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    auto& s = stats[device];
    for (auto* each : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.allocation}) {
      (*each)[0].reset_accumulated();
    }
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    auto& s = stats[device];
    for (auto* each : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.allocation}) (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    return {limit_bytes() - stats[device].allocated_bytes[0].current, limit_bytes()};
  }
};

// A plain allocator would make `torch.accelerator.memory_*` fail an internal assertion.
const bool registered = (c10::SetAllocator(kType, &DeviceMemory::get()), true);

struct PinnedMemory final : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;  // start -> size

  static PinnedMemory& get() {
    static auto* the = new PinnedMemory();
    return *the;
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    TORCH_CHECK(!setting("FAKEACC_NO_PINNED", 0), "fakeacc: this device has no pinned memory");
    void* bytes = std::malloc(std::max<size_t>(num_bytes, 1));
    std::lock_guard<std::mutex> lock(mutex);
    blocks[static_cast<char*>(bytes)] = num_bytes;
    return {bytes, bytes, &release, c10::Device(c10::kCPU)};
  }

  static void release(void* bytes) {
    {
      std::lock_guard<std::mutex> lock(get().mutex);
      get().blocks.erase(static_cast<char*>(bytes));
    }
    std::free(bytes);
  }

  bool holds(const void* pointer) {
    const auto* wanted = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound(wanted);
    if (after == blocks.begin()) return false;
    const auto& [start, num_bytes] = *std::prev(after);
    return wanted <= start + num_bytes;
  }

  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

}  // namespace

c10::Allocator* device_memory() { return &DeviceMemory::get(); }
c10::Allocator* pinned_memory() { return &PinnedMemory::get(); }
bool is_pinned(const void* pointer) { return PinnedMemory::get().holds(pointer); }

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr bytes = device_memory()->allocate(num_bytes);
  if (const size_t kept = std::min(num_bytes, storage.nbytes())) {
    race::begin(current_stream());
    race::access(storage.data(), current_stream(), false, "resize");
    race::access(bytes.get(), current_stream(), true, "resize");
    std::memcpy(bytes.get(), storage.data(), kept);
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(bytes));
  impl->set_nbytes(num_bytes);
}

}  // namespace fakeacc
