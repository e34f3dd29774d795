// The team of threads that computes one call: it goes on without a thread that has lost its CPU.
//
// All threads run the same code and share out the items of one phase after the other; a phase is over when its items are
// done, whoever did them. Which thread computes an item never changes a result. Each thread has a range of the items of
// its own, the same part of all in each phase: what it wrote in one phase is in its cache in the next. Who is through takes
// items from the others' ranges, and then the item that somebody has in hand and does not get on with.
//
// So a process that wants a core for a moment delays a step by its share of the cores. If all waited for its thread (as a
// barrier does), it would stop all of them: beside one that computes 200 us of each ms, a step took a quarter longer.
//
// What makes that safe:
//   * Results of an item are stored only by who holds it: between store() and stored() nobody can take it away, and who
//     has lost it stores nothing. Items are taken at the boundaries of runs, so that no sum is added twice.
//   * A thread that comes back may be many phases late. It reads what by then means something else, and drops the result.
//     Counts carry the phase they belong to, so it finds nothing to take until it has caught up.
//   * Whoever returns from a call of its own has waited for all (leave): nobody is late beyond the call.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace headrace {

static const int MAX_THREADS = 256;
static const int SPINS = 2000;              // about 20 us; then a waiting thread gives its CPU away
static const int SPINS_BETWEEN_LOOKS = 50;  // at what others have in hand
static const long SLEEP_NS = 100 * 1000;    // until a sleeping thread looks again

// How long a thread takes from one sign of life to the next, at the very worst, in ns: who is silent for longer has
// probably lost its CPU. Should it not have, it has worked for nothing.
struct Patience {
  long ns;
  static Patience of_products(double operations) {
#ifdef __AVX512F__
    const double each_ns = 200;
#else
    const double each_ns = 40;
#endif
    return {5000 + (long)(operations / each_ns)};
  }
};

// What a thread has in hand: phase | item | run | state
namespace hand {
static const uint64_t IDLE = 0, HELD = 1, STORING = 2, TAKEN = 3, STATE = 3;
static const int RUN = 2, ITEM = 18, PHASE = 44;  // positions: 16, 26 and 20 bits
static const uint64_t RUNS = 1 << (ITEM - RUN), ITEMS = 1 << (PHASE - ITEM);
static uint64_t of(uint64_t phase, long item) { return phase << PHASE | (uint64_t)item << ITEM | HELD; }
static bool is_held_in(uint64_t h, uint64_t phase) { return h >> PHASE == phase && (h & STATE) == HELD; }
static long item(uint64_t h) { return h >> ITEM & (ITEMS - 1); }
static long run(uint64_t h) { return h >> RUN & (RUNS - 1); }
}  // namespace hand

// The count of a phase: phase << 32 | count
static uint64_t counted(uint64_t phase, uint64_t count) { return phase << 32 | count; }

struct Shared {
  struct alignas(64) Range {
    std::atomic<uint64_t> taken;  // items
  };
  struct alignas(64) Member {
    std::atomic<uint64_t> done;   // items that this thread has finished
    std::atomic<uint64_t> hand;
    std::atomic<uint64_t> beats;  // signs of life, where runs are long
  };
  Range ranges[MAX_THREADS];
  Member members[MAX_THREADS];
  alignas(64) std::atomic<uint32_t> over{0};  // the last phase that is
  std::atomic<uint32_t> left{0}, sleepers{0};
  const int size;  // asked for; OpenMP may give fewer
  explicit Shared(int threads) : size(threads) {
    for (int i = 0; i < size; i++) {
      ranges[i].taken.store(0, std::memory_order_relaxed);
      for (auto* word : {&members[i].done, &members[i].hand, &members[i].beats}) word->store(0, std::memory_order_relaxed);
    }
  }
};

static void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}
// Spins, then sleeps, until `word` has changed from what it was in `is_done`'s eyes; look() now and then.
template <class Done, class Look>
static void wait_for(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, Done is_done, Look look) {
  for (int i = 1; i <= SPINS; i++) {
    if (is_done(word.load(std::memory_order_acquire))) return;
    if (i % SPINS_BETWEEN_LOOKS == 0) look();
    _mm_pause();
  }
  const timespec timeout{0, SLEEP_NS};
  sleepers.fetch_add(1);
  for (uint32_t value; !is_done(value = word.load()); look()) futex(word, FUTEX_WAIT_PRIVATE, value, &timeout);
  sleepers.fetch_sub(1);
}
static void wake(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers) {
  if (sleepers.load()) futex(word, FUTEX_WAKE_PRIVATE, MAX_THREADS, nullptr);
}

// An item in the hand of a thread. Its results are stored in runs, each between store() and stored(), but for the last
// one, which ends with the item.
struct Hold {
  Shared::Member* member;  // null: cannot be taken away
  uint64_t at;
  long first_run;          // those before are stored
  bool is_lost = false;

  // False if somebody else does the rest
  bool store() {
    if (!member) return true;
    uint64_t expected = at;
    if (member->hand.compare_exchange_strong(expected, at ^ hand::HELD ^ hand::STORING, std::memory_order_acq_rel)) return true;
    is_lost = true;
    return false;
  }
  void stored() {
    if (!member) return;
    at += 1 << hand::RUN;
    member->hand.store(at, std::memory_order_release);
  }
  void beat() {
    if (member) member->beats.store(member->beats.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
};

class Team {
 public:
  const int id, size;

  Team(Shared& shared, int id, int size) : id(id), size(size), shared_(shared) {}

  // f(i) for 0 <= i < n, taken `chunk` at a time: short items, which nobody takes from another.
  template <class F>
  void each(long n, long chunk, F f) {
    ranges(n, chunk, [&](long from, long to, long) {
      for (long i = from; i < to; i++) f(i);
      finished(to - from);
    });
  }
  // f(i, next, hold): the thread will work on `next` after i, if nobody else does; n if on none. f may be called for an
  // item whose first runs are stored already, and ends between store() and stored() or with a lost hold.
  template <class F>
  void each_ahead(long n, Patience patience, F f) {
    Shared::Member& own = shared_.members[id];
    const bool shows_hand = size > 1 && n <= (long)hand::ITEMS;
    ranges(n, 1, [&](long i, long to, long end) {
      Hold hold{shows_hand ? &own : nullptr, hand::of(phase_, i), 0};
      if (shows_hand) own.hand.store(hold.at, std::memory_order_release);
      f(i, to < end ? to : n, hold);
      if (hold.is_lost) return;
      finished(1);
      if (shows_hand) own.hand.store(hand::IDLE, std::memory_order_release);
    });
    if (size > 1) help(patience, [&](long item, Hold& hold) { f(item, n, hold); });
  }
  // Whether the phase is over: then its results are no more wanted, and what it reads may be gone.
  bool is_late() const { return size > 1 && shared_.over.load(std::memory_order_acquire) >= phase_; }

  // To be called after each phase
  void sync() {
    if (size > 1) help({0}, [](long, Hold&) {});
    phase_++, items_ = done_ = 0;
  }
  void leave() {
    if (size == 1) return;
    if (shared_.left.fetch_add(1) + 1 == (uint32_t)size) return wake(shared_.left, shared_.sleepers);
    wait_for(shared_.left, shared_.sleepers, [&](uint32_t left) { return left == (uint32_t)size; }, [] {});
  }

 private:
  Shared& shared_;
  uint64_t phase_ = 1;
  long items_ = 0;  // of this phase
  long done_ = 0;   // of them, by this thread

  void finished(long items) {
    done_ += items;
    if (size > 1) shared_.members[id].done.store(counted(phase_, done_), std::memory_order_release);
  }
  // f(from, to, end of the range)
  template <class F>
  void ranges(long n, long chunk, F f) {
    items_ = n;
    if (size == 1) {
      for (long i = 0; i < n; i += chunk) f(i, std::min(n, i + chunk), n);
      return;
    }
    const int R = shared_.size;
    for (int r = 0; r < R; r++) {
      const int range = (id + r) % R;
      const long begin = n * range / R, end = n * (range + 1) / R;
      for (long i; (i = begin + take(shared_.ranges[range].taken, end - begin, chunk)) < end;) f(i, std::min(end, i + chunk), end);
    }
  }
  // The first of `chunk` items taken; n when there are none left, or when the phase is long over
  long take(std::atomic<uint64_t>& taken, long n, long chunk) {
    for (uint64_t was = taken.load(std::memory_order_relaxed);;) {
      if (was >> 32 > phase_) return n;
      const long count = was >> 32 == phase_ ? was & 0xffffffff : 0;
      if (count >= n) return n;
      if (taken.compare_exchange_weak(was, counted(phase_, count + chunk), std::memory_order_acq_rel)) return count;
    }
  }
  bool is_complete() const {
    long done = 0;
    for (int m = 0; m < size; m++) {
      const uint64_t count = shared_.members[m].done.load(std::memory_order_acquire);
      if (count >> 32 == phase_) done += count & 0xffffffff;
    }
    return done == items_;
  }
  // True if the phase is over; who finds that out wakes the others
  bool note_end() {
    if (is_late()) return true;
    std::atomic_thread_fence(std::memory_order_seq_cst);  // of two who finish at once, one sees both
    uint32_t before = phase_ - 1;
    if (!is_complete()) return false;
    if (shared_.over.compare_exchange_strong(before, phase_)) wake(shared_.over, shared_.sleepers);
    return true;
  }
  // Until the phase is over: f(item, hold) for what others hold and do not get on with. No patience: only waits.
  template <class F>
  void help(Patience patience, F f) {
    if (note_end()) return;
    using Clock = std::chrono::steady_clock;
    int suspect = -1;  // a member that holds something, as it was when its silence began
    uint64_t held = 0, beats = 0;
    Clock::time_point since;
    auto look = [&] {
      if (!patience.ns) return;
      if (suspect >= 0) {
        Shared::Member& m = shared_.members[suspect];
        if (m.hand.load(std::memory_order_relaxed) == held && m.beats.load(std::memory_order_relaxed) == beats) {
          if (Clock::now() - since < std::chrono::nanoseconds(patience.ns)) return;
          uint64_t expected = held;
          if (m.hand.compare_exchange_strong(expected, held | hand::TAKEN, std::memory_order_acq_rel)) {
            Hold hold{nullptr, 0, hand::run(held)};
            f(hand::item(held), hold);
            finished(1);
            note_end();
          }
        }
        suspect = -1;
      }
      for (int m = 0; m < size && suspect < 0; m++) {
        const uint64_t h = shared_.members[m].hand.load(std::memory_order_relaxed);
        if (m == id || !hand::is_held_in(h, phase_)) continue;
        suspect = m, held = h, beats = shared_.members[m].beats.load(std::memory_order_relaxed), since = Clock::now();
      }
    };
    wait_for(shared_.over, shared_.sleepers, [&](uint32_t over) { return over >= phase_; }, look);
  }
};

template <class F>
static void run_team(int threads, F f) {
  threads = std::max(1, std::min(threads, MAX_THREADS));
  Shared shared(threads);
  if (threads == 1) {
    Team team(shared, 0, 1);
    return f(team);
  }
#pragma omp parallel num_threads(threads)
  {
    Team team(shared, omp_get_thread_num(), omp_get_num_threads());
    f(team);
    team.leave();  // before the join, which spins
  }
}

}  // namespace headrace
