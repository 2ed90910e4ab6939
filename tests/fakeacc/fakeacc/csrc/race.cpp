// See race.h.
#include "race.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

namespace fakeacc::race {

namespace {

struct Access {
  Stream stream{-1, 0};
  int64_t time = 0;  // 0: none
  std::string operation;
};

struct Block {
  Stream home;  // whose pool the bytes come from
  Access write;
  std::map<Stream, Access> reads;  // since the last write
  std::vector<Stream> kept_for;
  std::vector<Access> before;  // by the owner of the same bytes before
};

struct State {
  std::recursive_mutex mutex;
  std::map<Stream, Clock> clocks;
  Clock host;  // what the host has waited for; work that it queues later knows of it
  std::map<int64_t, Clock> events;
  std::map<const void*, Block> blocks;
  std::map<Stream, std::vector<Access>> pools;  // what may still run on the freed bytes of a stream's pool
  std::vector<std::string> reports;
};

constexpr size_t kMaxReports = 200;
std::atomic<bool> on{false};

State& state() {
  static State* the = new State();  // never destroyed: tensors may die after static destructors ran
  return *the;
}

std::string name(Stream stream) { return std::to_string(stream.first) + "/s" + std::to_string(stream.second); }

void report(const std::string& text) {
  if (state().reports.size() < kMaxReports) state().reports.push_back(text);
}

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, time] : from) into[stream] = std::max(into[stream], time);
}

Clock& current(Stream stream) {
  Clock& clock = state().clocks[stream];
  merge(clock, state().host);
  return clock;
}

bool knows(Clock& clock, const Access& access) { return access.time <= clock[access.stream]; }

void check_bytes(Block& block, Clock& clock, Stream stream, const std::string& operation) {
  for (const Access& earlier : block.before) {
    if (!knows(clock, earlier)) {
      report(operation + " on " + name(stream) + " uses bytes freed while " + earlier.operation +
             " may still run on " + name(earlier.stream));
    }
  }
  block.before.clear();
}

// Holds the lock where the checker is on; false where it is not.
struct Locked {
  std::unique_lock<std::recursive_mutex> lock{state().mutex, std::defer_lock};
  Locked() {
    if (on) lock.lock();
  }
  explicit operator bool() const { return lock.owns_lock() && on; }
};

}  // namespace

void check(bool checks) {
  State& s = state();
  std::lock_guard<std::recursive_mutex> lock(s.mutex);
  on = checks;
  s.clocks.clear();
  s.host.clear();
  s.events.clear();
  s.blocks.clear();
  s.pools.clear();
  s.reports.clear();
}

bool is_on() { return on; }

std::vector<std::string> take_reports() {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  return std::exchange(state().reports, {});
}

void begin(Stream stream) {
  if (Locked locked; locked) current(stream)[stream]++;
}

void access(const void* pointer, Stream stream, bool writes, const std::string& operation) {
  Locked locked;
  if (!locked) return;
  auto found = state().blocks.find(pointer);
  if (found == state().blocks.end()) return;  // from before the checker was on
  Block& block = found->second;
  Clock& clock = current(stream);
  check_bytes(block, clock, stream, operation);
  if (block.write.time && block.write.stream != stream && !knows(clock, block.write)) {
    report(operation + " on " + name(stream) + (writes ? " overwrites" : " reads") + " what " + block.write.operation +
           " wrote on " + name(block.write.stream) + " without waiting");
  }
  if (!writes) {
    block.reads[stream] = {stream, clock[stream], operation};
    return;
  }
  for (const auto& [reader, read] : block.reads) {
    if (reader != stream && !knows(clock, read)) {
      report(operation + " on " + name(stream) + " overwrites what " + read.operation + " still reads on " +
             name(reader));
    }
  }
  block.reads.clear();
  block.write = {stream, clock[stream], operation};
}

void allocated(const void* pointer, Stream stream) {
  Locked locked;
  if (!locked) return;
  auto& pool = state().pools[stream];
  Clock& clock = current(stream);
  pool.erase(std::remove_if(pool.begin(), pool.end(), [&](const Access& each) { return knows(clock, each); }),
             pool.end());
  Block block;
  block.home = stream;
  block.before = pool;  // any of those bytes may be these
  state().blocks[pointer] = block;
}

void freed(const void* pointer) {
  Locked locked;
  if (!locked) return;
  auto found = state().blocks.find(pointer);
  if (found == state().blocks.end()) return;
  const Block& block = found->second;
  auto& pool = state().pools[block.home];
  auto leave = [&](const Access& each) {
    if (!each.time || each.stream == block.home) return;
    for (Stream stream : block.kept_for) {
      if (knows(current(stream), each)) return;  // the allocator waits for that stream before it gives the bytes out
    }
    pool.push_back(each);
  };
  leave(block.write);
  for (const auto& [reader, read] : block.reads) leave(read);
  state().blocks.erase(found);
}

void keep_for(const void* pointer, Stream stream) {
  Locked locked;
  if (!locked) return;
  auto found = state().blocks.find(pointer);
  if (found != state().blocks.end()) found->second.kept_for.push_back(stream);
}

void record(int64_t event, Stream stream) {
  Locked locked;
  if (!locked) return;
  begin(stream);
  state().events[event] = current(stream);
}

void wait(Stream stream, int64_t event) {
  if (Locked locked; locked) merge(current(stream), state().events[event]);
}

void host_waits_for(Stream stream) {
  if (Locked locked; locked) merge(state().host, Clock(current(stream)));
}

void host_waits_for_device(int device) {
  Locked locked;
  if (!locked) return;
  for (const auto& [stream, clock] : state().clocks) {
    if (stream.first == device) merge(state().host, Clock(clock));
  }
}

void host_waits_for_event(int64_t event) {
  if (Locked locked; locked) merge(state().host, state().events[event]);
}

Clock clock_of(Stream stream) {
  Locked locked;
  return locked ? current(stream) : Clock{};
}

void join(Stream stream, const Clock& clock) {
  if (Locked locked; locked) merge(current(stream), clock);
}

}  // namespace fakeacc::race
