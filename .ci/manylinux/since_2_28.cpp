// What this system's headers and libstdc++.a ask of a glibc newer than 2.28, by older means.
//
// Owns nothing else; each library of the wheel gets what it needs of this, hidden.
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

extern "C" {

// glibc 2.32: whether the process has one thread, a hint to save atomic instructions.
char __libc_single_threaded = 0;

// glibc 2.33: before, stat and its kin were inline functions that called these.
#ifdef __x86_64__
constexpr int kStatVersion = 1;
#else
constexpr int kStatVersion = 0;
#endif
int __xstat(int version, const char* path, struct stat* found);
int __lxstat(int version, const char* path, struct stat* found);
int __fxstat(int version, int descriptor, struct stat* found);
int __fxstatat(int version, int folder, const char* path, struct stat* found, int flags);
int stat(const char* path, struct stat* found) noexcept {
  return __xstat(kStatVersion, path, found);
}
int lstat(const char* path, struct stat* found) noexcept {
  return __lxstat(kStatVersion, path, found);
}
int fstat(int descriptor, struct stat* found) noexcept {
  return __fxstat(kStatVersion, descriptor, found);
}
int fstatat(int folder, const char* path, struct stat* found, int flags) noexcept {
  return __fxstatat(kStatVersion, folder, path, found, flags);
}

// glibc 2.30: deadlines of another clock. Before, libstdc++ turned them into those of the clock of
// the day, as here: a change of that clock while a thread waits changes how long it waits.
static timespec of_the_day(clockid_t clock, const timespec* deadline) {
  constexpr long kSecond = 1'000'000'000;
  timespec now, day;
  ::clock_gettime(clock, &now);
  ::clock_gettime(CLOCK_REALTIME, &day);
  timespec sum{deadline->tv_sec - now.tv_sec + day.tv_sec,
               deadline->tv_nsec - now.tv_nsec + day.tv_nsec};
  while (sum.tv_nsec < 0) {
    sum.tv_nsec += kSecond;
    --sum.tv_sec;
  }
  while (sum.tv_nsec >= kSecond) {
    sum.tv_nsec -= kSecond;
    ++sum.tv_sec;
  }
  return sum;
}
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  const timespec day = of_the_day(clock, deadline);
  return ::pthread_cond_timedwait(condition, mutex, &day);
}
int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock,
                            const timespec* deadline) noexcept {
  const timespec day = of_the_day(clock, deadline);
  return ::pthread_mutex_timedlock(mutex, &day);
}

}  // extern "C"
