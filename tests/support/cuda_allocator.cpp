// An allocator with the statistics of the installed torch, at the places where its CUDA allocator has them.
#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

using c10::CachingDeviceAllocator::DeviceStats;

namespace c10::cuda::CUDACachingAllocator {
class CUDAAllocator {
 public:
  virtual ~CUDAAllocator() = default;
};
namespace Native {
struct DeviceCachingAllocator {
  mutable std::recursive_mutex mutex;
  DeviceStats stats;
  char blocks[8192];
};
class NativeCachingAllocator : public CUDAAllocator {
 public:
  std::mutex locks[67];
  long clock[1001][2];
  std::vector<char> not_devices{'a', 'b'};
  std::vector<std::unique_ptr<DeviceCachingAllocator>> device_allocator;
};
} // namespace Native
std::atomic<CUDAAllocator*> allocator;
} // namespace c10::cuda::CUDACachingAllocator

using namespace c10::cuda::CUDACachingAllocator;
static Native::NativeCachingAllocator native;

template <typename Array>
static void change(Array& counter, int pool, int64_t amount) {
  for (int at : {0, pool}) {
    amount < 0 ? counter[at].decrease(-amount) : counter[at].increase(amount);
  }
}

extern "C" {
void* start(int devices) {
  for (int at = 0; at < devices; at++) {
    native.device_allocator.push_back(std::make_unique<Native::DeviceCachingAllocator>());
  }
  allocator = &native;
  return &allocator;
}
void segment(int device, int pool, int64_t bytes) {
  auto& stats = native.device_allocator[device]->stats;
  change(stats.segment, pool, 1);
  change(stats.reserved_bytes, pool, bytes);
}
void block(int device, int pool, int sign, int64_t requested, int64_t bytes) {
  auto& stats = native.device_allocator[device]->stats;
  change(stats.allocation, pool, sign);
  change(stats.active, pool, sign);
  change(stats.allocated_bytes, pool, sign * bytes);
  change(stats.active_bytes, pool, sign * bytes);
  change(stats.requested_bytes, pool, sign * requested);
}
void split(int device, int pool, int64_t bytes) {
  auto& stats = native.device_allocator[device]->stats;
  change(stats.inactive_split, pool, bytes < 0 ? -1 : 1);
  change(stats.inactive_split_bytes, pool, bytes);
}
void out_of_memory(int device) {
  native.device_allocator[device]->stats.num_alloc_retries += 2;
  native.device_allocator[device]->stats.num_ooms++;
}
void torn(int device, int64_t bytes) {
  native.device_allocator[device]->stats.allocated_bytes[0].current += bytes;
}
}
