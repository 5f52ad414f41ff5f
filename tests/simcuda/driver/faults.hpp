// Counters, violations, and failures that tests ask for.
//
// Owns what the functions simcuda_get_counters() and simcuda_fail() speak of. Never blocks.
#ifndef SIMCUDA_DRIVER_FAULTS_HPP_
#define SIMCUDA_DRIVER_FAULTS_HPP_

#include <list>
#include <mutex>
#include <string>
#include <vector>

#include "controls.hpp"

namespace simcuda {

class Faults {
 public:
  // `rules`: the variable SIMCUDA_FAIL, "function:n:code,...", or nullptr.
  explicit Faults(const char* rules);
  void add(const std::string& function, int nth, int code);
  void forget();
  int next(const std::string& function);  // counts the call; 0: it goes on

  void leave_out(const std::string& function, int every, int at);
  bool leaves_out(const std::string& function);  // counts the call

  void violate(const std::string& text);
  const char* last_violation();

  void count(uint64_t simcuda_counters::* counter, int64_t more);
  simcuda_counters counters();
  void reset();

 private:
  struct Rule {
    std::string function;
    int left;
    int code;
  };
  struct Gap {
    std::string function;
    int every;
    int at;
    int seen;
  };
  std::mutex mutex_;
  std::vector<Rule> rules_;
  std::vector<Gap> gaps_;
  std::list<std::string> violations_;  // a list: its texts never move
  simcuda_counters counters_{};
};

// Of this process, made at the first use, never destroyed: threads of streams outlive main().
Faults& faults();

inline void count(uint64_t simcuda_counters::* counter, int64_t more = 1) {
  faults().count(counter, more);
}

}  // namespace simcuda

#endif  // SIMCUDA_DRIVER_FAULTS_HPP_
