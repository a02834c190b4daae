// One pass of AdamW over the parts of a tile: a gradient is read as it travelled, master and moments are
// stepped in place, the rounded weight is written. Each byte goes over the memory bus once in each direction.
//
// The operations, their order and where they are fused are those of torch's vectorised fused AdamW, so that
// every bit is the same; `proof.py` compares them before the kernel is used. Built with -ffp-contract=off: the
// only fused operations are those written as such.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct Part {
  const void* gradient;
  float* master;
  void* average;
  void* square;
  void* rounded;
  int64_t count;      // elements
  int64_t before;     // elements of the parts before this one
  float step_size;    // lr / (1 - beta1 ** step), negated
  float correction;   // sqrt(1 - beta2 ** step)
};

struct Settings {
  float keep;         // 1 - lr * weight_decay; 1 without weight decay
  float weight1;      // 1 - beta1
  float beta2;
  float weight2;      // 1 - beta2
  float eps;
  float sign;         // -1 to maximize, else 1
  float ranks;        // the gradient is divided by this,
  float grad_scale;   // then by this,
  float clip;         // then multiplied by this
  int32_t scaled;     // whether any of the three is not 1
};

struct bfloat16 {
  uint16_t bits;
};

inline float widened(float value) { return value; }

inline float widened(bfloat16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void put(float& target, float value) { target = value; }

// To nearest, ties to even; NaN stays NaN.
inline void put(bfloat16& target, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  target.bits = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

struct nothing {};

inline void put(nothing&, float) {}

template <typename T>
T* at(const void* start, int64_t index) {
  return static_cast<T*>(const_cast<void*>(start)) + index;
}

template <>
nothing* at<nothing>(const void* start, int64_t) {
  return static_cast<nothing*>(const_cast<void*>(start));
}

template <typename Gradient, typename Moment, typename Weight, bool near>
void step(const Part& part, const Settings& now, int64_t first, int64_t last) {
  const Gradient* __restrict gradients = at<const Gradient>(part.gradient, 0);
  float* __restrict masters = part.master;
  Moment* __restrict averages = at<Moment>(part.average, 0);
  Moment* __restrict squares = at<Moment>(part.square, 0);
  Weight* __restrict weights = at<Weight>(part.rounded, 0);
  const float step_size = part.step_size, correction = part.correction;
  const Settings set = now;
  for (int64_t i = first; i < last; ++i) {
    float gradient = widened(gradients[i]);
    if (set.scaled) gradient = gradient / set.ranks / set.grad_scale * set.clip;
    gradient *= set.sign;
    float average = widened(averages[i]);
    // torch's lerp takes the end that is nearer as its base.
    const float way = gradient - average;
    average = near ? __builtin_fmaf(set.weight1, way, average) : __builtin_fmaf(set.weight1 - 1.0f, way, gradient);
    const float square =
        __builtin_fmaf(set.weight2 * gradient, gradient, widened(squares[i]) * set.beta2);
    const float root = __builtin_sqrtf(square) / correction + set.eps;
    const float master = masters[i] * set.keep + step_size * average / root;
    put(averages[i], average);
    put(squares[i], square);
    masters[i] = master;
    if constexpr (sizeof(Weight) > 1) put(weights[i], master);
  }
}

using Step = void (*)(const Part&, const Settings&, int64_t, int64_t);

template <typename Gradient, typename Moment, typename Weight>
Step by_base(bool near) {
  return near ? step<Gradient, Moment, Weight, true> : step<Gradient, Moment, Weight, false>;
}

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, NOTHING = 2 };

template <typename Gradient, typename Moment>
Step by_weight(int weight, bool near) {
  if (weight == FLOAT32) return by_base<Gradient, Moment, float>(near);
  if (weight == BFLOAT16) return by_base<Gradient, Moment, bfloat16>(near);
  return by_base<Gradient, Moment, nothing>(near);
}

template <typename Gradient>
Step by_moment(int moment, int weight, bool near) {
  return moment == FLOAT32 ? by_weight<Gradient, float>(weight, near)
                           : by_weight<Gradient, bfloat16>(weight, near);
}

// Elements [begin, end), counted through all parts.
void take(const Part* parts, int64_t length, const Settings& settings, Step taken, int64_t begin, int64_t end) {
  int64_t low = 0, high = length - 1;  // the part that has element `begin`
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (parts[middle].before <= begin) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  for (; low < length && parts[low].before < end; ++low) {
    const Part& part = parts[low];
    const int64_t first = std::max<int64_t>(begin - part.before, 0);
    const int64_t last = std::min(end - part.before, part.count);
    taken(part, settings, first, last);
  }
}

// The parts of a tile, cut into runs that threads take as they get to them.
struct Job {
  std::vector<Part> parts;
  Settings settings;
  Step taken;
  int64_t total, run, runs;
  std::atomic<int64_t> next{0};
  int64_t done = 0;  // runs; under the crew's lock
};

// Threads that go from tile to tile without meeting: while the last runs of one are still being computed, the
// first of the next are. Between steps they sleep.
class Crew {
 public:
  explicit Crew(int threads) {
    try {
      for (int number = 0; number < threads; ++number) threads_.emplace_back([this] { work(); });
    } catch (...) {
      leave();
      throw;
    }
  }

  ~Crew() { leave(); }

  void add(std::shared_ptr<Job> job) {
    {
      std::lock_guard<std::mutex> held(lock_);
      jobs_.push_back(std::move(job));
    }
    more_.notify_all();
  }

  void wait(const Job& job) {
    std::unique_lock<std::mutex> held(lock_);
    done_.wait(held, [&] { return job.done == job.runs; });
  }

 private:
  void work() {
    std::unique_lock<std::mutex> held(lock_);
    while (true) {
      more_.wait(held, [this] { return leaving_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const std::shared_ptr<Job> job = jobs_.front();
      held.unlock();
      int64_t done = 0;
      for (int64_t number; (number = job->next.fetch_add(1)) < job->runs; ++done) {
        const int64_t begin = number * job->run, end = std::min(begin + job->run, job->total);
        take(job->parts.data(), job->parts.size(), job->settings, job->taken, begin, end);
      }
      held.lock();
      if (!jobs_.empty() && jobs_.front() == job) jobs_.pop_front();  // none of its runs is left to take
      job->done += done;
      if (job->done == job->runs) done_.notify_all();
    }
  }

  void leave() {
    {
      std::lock_guard<std::mutex> held(lock_);
      leaving_ = true;
    }
    more_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::mutex lock_;
  std::condition_variable more_, done_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool leaving_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

extern "C" {

// Null when the system refuses the threads.
Crew* memtriage_crew(int threads) {
  try {
    return new Crew(threads);
  } catch (...) {
    return nullptr;
  }
}

// No job may be under way.
void memtriage_crew_leave(Crew* crew) { delete crew; }

// Has the crew step `parts`, at least one and none empty, behind what it was given before. The kinds are of
// gradients, moments and rounded weights; a thread takes `run` elements at a time. Null without memory.
void* memtriage_start(Crew* crew, const Part* parts, int64_t length, const Settings* settings, int gradient,
                      int moment, int weight, int64_t run) {
  try {
    auto job = std::make_shared<Job>();
    const bool near = std::fabs(settings->weight1) < 0.5f;
    job->parts.assign(parts, parts + length);
    job->settings = *settings;
    job->taken = gradient == FLOAT32 ? by_moment<float>(moment, weight, near)
                                     : by_moment<bfloat16>(moment, weight, near);
    job->total = parts[length - 1].before + parts[length - 1].count;
    job->run = run;
    job->runs = (job->total + run - 1) / run;
    auto* ticket = new std::shared_ptr<Job>(job);
    crew->add(std::move(job));
    return ticket;
  } catch (...) {
    return nullptr;
  }
}

// Until the job is done; once for each ticket.
void memtriage_wait(Crew* crew, void* ticket) {
  auto* job = static_cast<std::shared_ptr<Job>*>(ticket);
  crew->wait(**job);
  delete job;
}
}
