// A run of the simulator: one platform, one form of a collective, several sizes.
//
// Usage: simulate PLATFORM operation=NAME form=hsgd|mpi radix=N ranks=N bytes=N,N...
//   [local_s=X] [local_s_per_byte=X] [--cfg=...of SimGrid]
// Rank i runs on the platform's host "node-i". Prints a line of JSON for each size.
#include <mpi.h>
#include <smpi/smpi.h>

#include <cstdio>
#include <cstdlib>
#include <simgrid/s4u.hpp>
#include <sstream>
#include <string>

#include "program.hpp"

namespace {

[[noreturn]] void refuse(const std::string& argument) {
  std::fprintf(stderr, "simulate: %s is not understood; the head of simulate.cpp says what is\n",
               argument.c_str());
  std::exit(2);
}

void read(const std::string& argument, simulation::Arguments* out) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) refuse(argument);
  const std::string name = argument.substr(0, equals);
  const std::string value = argument.substr(equals + 1);
  if (name == "operation") {
    out->operation = value;
  } else if (name == "form" && (value == "hsgd" || value == "mpi")) {
    out->ours = value == "hsgd";
  } else if (name == "radix") {
    out->radix = std::atoi(value.c_str());
  } else if (name == "ranks") {
    out->ranks = std::atoi(value.c_str());
  } else if (name == "local_s") {
    out->local_s = std::atof(value.c_str());
  } else if (name == "local_s_per_byte") {
    out->local_s_per_byte = std::atof(value.c_str());
  } else if (name == "bytes") {
    std::istringstream words(value);
    for (std::string word; std::getline(words, word, ',');) {
      out->bytes.push_back(std::strtoull(word.c_str(), nullptr, 10));
    }
  } else {
    refuse(argument);
  }
}

// The simulator takes a function without arguments of its own for what ranks run.
simulation::Program*& program_of_this_run() {
  static simulation::Program* program = nullptr;
  return program;
}

void run_rank(int, char**) {
  MPI_Init(nullptr, nullptr);
  program_of_this_run()->run_rank();
  MPI_Finalize();
}

}  // namespace

int main(int argc, char** argv) {
  smpi_init_options();                       // before the engine reads what is set
  simgrid::s4u::Engine engine(&argc, argv);  // takes what begins with --cfg and --log
  if (argc < 2) refuse("a command without a platform");
  simulation::Arguments arguments;
  for (int i = 2; i < argc; ++i) read(argv[i], &arguments);
  if (arguments.bytes.empty() || arguments.ranks < 1 || arguments.radix < 2) {
    refuse("a command without sizes or ranks, or with a radix below 2");
  }
  simulation::Program program(arguments);
  SMPI_init();
  engine.load_platform(argv[1]);
  program_of_this_run() = &program;
  SMPI_app_instance_register("rank", run_rank, arguments.ranks);
  for (int rank = 0; rank < arguments.ranks; ++rank) {
    const std::string number = std::to_string(rank);
    const auto actor = simgrid::s4u::Actor::create("rank", engine.host_by_name("node-" + number),
                                                   [] { run_rank(0, nullptr); });
    actor->set_property("instance_id", "rank");
    actor->set_property("rank", number);
  }
  engine.run();
  SMPI_finalize();
  return 0;
}
