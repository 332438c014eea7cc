// Units of work for threads that live for one call, so that a forked child never waits for a thread it doesn't have.
//
// Any thread may take any unit, so a unit's result must not depend on its thread.
#pragma once
#include <pthread.h>
#include <cstdlib>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Flushes denormal numbers to zero during a call: with them a decaying state would be many times slower.
struct FlushTiny {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  FlushTiny() { _mm_setcsr(before | 0x8040); }
  ~FlushTiny() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;
  FlushTiny() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" : : "r"(before | (1ull << 24)));
  }
  ~FlushTiny() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#endif
};

constexpr int MOST_THREADS = 256;

struct Crew {
  void (*work)(void *task, int unit, char *scratch);
  void *task;
  int units, next;
};

struct Worker {
  Crew *crew;
  char *scratch;
  pthread_t thread;
};

static inline void *work(void *argument) {
  Worker *self = (Worker *)argument;
  FlushTiny tiny;
  for (int unit; (unit = __atomic_fetch_add(&self->crew->next, 1, __ATOMIC_RELAXED)) < self->crew->units;)
    self->crew->work(self->crew->task, unit, self->scratch);
  return nullptr;
}

// Calls function(task, unit, scratch) for every unit, with fewer threads if some can't start. False if out of memory.
static inline bool share(void (*function)(void *, int, char *), void *task, int units, int threads, size_t scratch) {
  threads = threads < units ? threads : units;
  threads = threads < MOST_THREADS ? threads : MOST_THREADS;
  threads = threads < 1 ? 1 : threads;
  scratch = (scratch + 4095) / 4096 * 4096;
  char *memory = scratch ? (char *)aligned_alloc(4096, scratch * threads) : nullptr;
  if (scratch && !memory) return false;
  Crew crew{function, task, units, 0};
  Worker workers[MOST_THREADS];
  int started = 1;
  for (int i = 0; i < threads; i++) workers[i] = Worker{&crew, memory + scratch * i, {}};
  while (started < threads && pthread_create(&workers[started].thread, nullptr, work, &workers[started]) == 0)
    started++;
  work(&workers[0]);
  for (int i = 1; i < started; i++) pthread_join(workers[i].thread, nullptr);
  free(memory);
  return true;
}
