// Splits the two layers of a feed-forward block over ranks, as engines for language models do.
//
//   c++ -O3 -std=c++17 tensor_parallel.cpp -o tensor_parallel $(hsgd info --flags)
//   hsgd run -np 2 ./tensor_parallel
//
// Each rank has some of the inner rows and columns. Partial results lie in memory that hsgd's ranks
// share, so that the sum of a token is one call without a copy.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "hsgd_core.h"

namespace {

constexpr int kWidth = 1024;  // of a token
constexpr int kInner = 4096;

hsgd_error error;

void check(int code) {
  if (code == HSGD_OK) return;
  std::fprintf(stderr, "tensor_parallel: %s\n", error.message);
  std::exit(1);
}

int number(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) {
    std::fprintf(stderr, "tensor_parallel: %s is not set; start with hsgd run\n", name);
    std::exit(1);
  }
  return std::atoi(value);
}

double weight(int row, int column) { return std::sin(row * 0.37 + column * 1.3) / kWidth; }

// Returns rows first, ..., last - 1 of a matrix of kWidth columns.
std::vector<float> rows(int first, int last) {
  std::vector<float> all;
  for (int row = first; row < last; ++row)
    for (int column = 0; column < kWidth; ++column)
      all.push_back(static_cast<float>(weight(row, column)));
  return all;
}

// Writes to `out` what these inner rows make of a token.
void apply(const std::vector<float>& in_rows, const std::vector<float>& out_rows,
           const float* token, float* out) {
  for (int column = 0; column < kWidth; ++column) out[column] = 0;
  for (size_t at = 0; at < in_rows.size(); at += kWidth) {
    float inner = 0;
    for (int column = 0; column < kWidth; ++column) inner += in_rows[at + column] * token[column];
    if (inner <= 0) continue;  // ReLU
    for (int column = 0; column < kWidth; ++column) out[column] += inner * out_rows[at + column];
  }
}

}  // namespace

int main() {
  const int rank = number("RANK"), size = number("WORLD_SIZE");
  const char* folder = std::getenv("XDG_RUNTIME_DIR");
  const std::string path = std::string(folder != nullptr ? folder : "/tmp") + "/tensor-parallel-" +
                           std::to_string(number("MASTER_PORT"));
  hsgd_options options;
  hsgd_comm* comm = nullptr;
  hsgd_buffer* buffer = nullptr;
  check(hsgd_options_from_env(&options, &error));
  check(hsgd_comm_create_local(path.c_str(), rank, size, &options, &comm, &error));
  check(hsgd_comm_allocate(comm, kWidth, HSGD_FLOAT32, nullptr, &buffer, &error));
  float* sum = static_cast<float*>(hsgd_buffer_data(buffer));

  const int first = kInner * rank / size, last = kInner * (rank + 1) / size;
  const std::vector<float> mine = rows(first, last), all = rows(0, kInner);
  std::vector<float> token(kWidth), whole(kWidth);
  double error_most = 0;
  int wrong = 0;
  for (int step = 0; step < 20; ++step) {
    for (int column = 0; column < kWidth; ++column) token[column] = std::cos(column * 0.1 + step);
    apply(mine, mine, token.data(), sum);
    check(hsgd_comm_allreduce(comm, sum, sum, kWidth, HSGD_FLOAT32, HSGD_SUM, nullptr, &error));
    apply(all, all, token.data(), whole.data());
    for (int column = 0; column < kWidth; ++column) {
      const double off = std::fabs(whole[column] - sum[column]);
      error_most = std::fmax(error_most, off);
      wrong += off < 1e-6 ? 0 : 1;  // NaN is wrong, too
    }
  }
  if (rank == 0)
    std::printf("%d ranks, %d of %d inner rows on the first: largest error %.1e\n", size, last,
                kInner, error_most);
  hsgd_buffer_free(buffer);
  hsgd_comm_destroy(comm);
  return wrong == 0 ? 0 : 1;
}
