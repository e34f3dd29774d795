// Threads of a team that stop where a thread can lose its CPU; see test_team.py. Prints what went wrong, or nothing.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "team.h"

using namespace headrace;

static void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}
template <class Condition>
static void wait_until(const char* what, Condition holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!holds()) {
    require(std::chrono::steady_clock::now() < end, what);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}
static void run(int threads, const std::function<void(Team&)>& body) {
  Shared shared(threads);
  std::vector<std::thread> others;
  auto member = [&](int id) {
    Team team(shared, id, threads);
    body(team);
    team.leave();
  };
  for (int id = 1; id < threads; id++) others.emplace_back(member, id);
  member(0);
  for (std::thread& t : others) t.join();
}
static const Patience SHORT{20 * 1000};

// Who stops with an item in hand does not stop the team, and stores nothing when it comes back, phases later.
static void goes_on_without(int threads) {
  std::atomic<int> stopped{-1}, phases_over{0}, times_stored[8] = {};
  std::atomic<bool> has_lost{false};
  run(threads, [&](Team& team) {
    team.each_ahead(8, SHORT, [&](long item, long, Hold& hold) {
      int nobody = -1;
      if (hold.member && stopped.compare_exchange_strong(nobody, team.id))
        wait_until("the team did not go on", [&] { return phases_over.load() >= 3; });
      if (!hold.store()) {
        has_lost = true;
        return;
      }
      times_stored[item]++;
    });
    team.sync();
    for (int phase = 1; phase <= 3; phase++) {
      team.each(64, 4, [](long) {});
      team.sync();
      if (team.id != stopped) {
        int before = phase - 1;
        phases_over.compare_exchange_strong(before, phase);
      }
    }
  });
  require(has_lost, "who had stopped did not learn that its item was taken");
  for (auto& times : times_stored) require(times == 1, "an item was not stored once");
}

// Runs that are stored already are not done again: the second one is where the thread stops.
static void resumes_behind_what_is_stored(int threads) {
  static const long RUNS = 5;
  std::atomic<int> stopped{-1}, taken_over_at{-1}, times_stored[4][RUNS] = {};  // stopped: an item
  run(threads, [&](Team& team) {
    team.each_ahead(4, SHORT, [&](long item, long, Hold& hold) {
      if (!hold.member && item == stopped) taken_over_at = (int)hold.first_run;
      for (long r = hold.first_run; r < RUNS; r++) {
        int nobody = -1;
        if (r == 2 && hold.member && stopped.compare_exchange_strong(nobody, (int)item))
          wait_until("nobody took the item", [&] { return taken_over_at.load() >= 0; });
        if (!hold.store()) return;
        times_stored[item][r]++;
        if (r + 1 < RUNS) hold.stored();
      }
    });
    team.sync();
  });
  require(taken_over_at == 2, "the item was not taken over where it had stopped");
  for (auto& item : times_stored)
    for (auto& times : item) require(times == 1, "a run was not stored once");
}

// Nobody takes an item while its results are being stored.
static void waits_for_who_stores(int threads) {
  std::atomic<int> storing{-1}, done{0};  // storing: an item
  std::atomic<bool> is_stored{false};
  run(threads, [&](Team& team) {
    team.each_ahead(4, SHORT, [&](long item, long, Hold& hold) {
      require(item != storing, "an item was taken from who was storing it");
      if (!hold.store()) return;
      int nobody = -1;
      if (storing.compare_exchange_strong(nobody, (int)item)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        is_stored = true;
      }
      done++;
    });
    team.sync();
    require(is_stored, "the phase ended before its items were stored");
  });
  require(done == 4, "items were not done once");
}

// Sums of what the phase before has made: each phase adds to what each run holds, once, whoever stops wherever.
static void adds_once(int threads, unsigned seed, int phases) {
  static const long ITEMS = 24, RUNS = 3;
  std::vector<long> values(ITEMS * RUNS, 1), others(ITEMS * RUNS, 0);
  run(threads, [&](Team& team) {
    std::mt19937 random(seed * 1000 + team.id);
    auto stop = [&](unsigned one_in) {
      if (random() % one_in == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    };
    std::vector<long>*from = &values, *to = &others;
    for (int phase = 0; phase < phases; phase++) {
      team.each_ahead(ITEMS, SHORT, [&](long item, long, Hold& hold) {
        for (long r = hold.first_run; r < RUNS; r++) {
          long sum = 0;
          for (const long& v : *from) sum += __atomic_load_n(&v, __ATOMIC_RELAXED);
          stop(20);
          if (!hold.store()) return;
          stop(200);
          long& value = (*to)[item * RUNS + r];
          __atomic_store_n(&value, value + sum % 1009 + r, __ATOMIC_RELAXED);  // of a run, or the load would be another's
          if (r + 1 < RUNS) hold.stored();
        }
      });
      team.sync();
      team.each(ITEMS * RUNS, 2, [&](long i) {
        stop(400);
        long& value = (*from)[i];
        __atomic_store_n(&value, value % 97, __ATOMIC_RELAXED);
      });
      team.sync();
      std::swap(from, to);
    }
  });
  std::vector<long> first(ITEMS * RUNS, 1), second(ITEMS * RUNS, 0), *from = &first, *to = &second;
  for (int phase = 0; phase < phases; phase++) {
    long sum = 0;
    for (long v : *from) sum += v;
    for (long i = 0; i < ITEMS * RUNS; i++) (*to)[i] += sum % 1009 + i % RUNS;
    for (long& v : *from) v %= 97;
    std::swap(from, to);
  }
  require(values == first && others == second, "sums differ from those of one thread");
}

int main(int, char** arguments) {
  const std::string what = arguments[1];
  const int threads = std::atoi(arguments[2]);
  if (what == "goes_on") goes_on_without(threads);
  else if (what == "resumes") resumes_behind_what_is_stored(threads);
  else if (what == "waits") waits_for_who_stores(threads);
  else adds_once(threads, std::atoi(arguments[3]), std::atoi(arguments[4]));
}
