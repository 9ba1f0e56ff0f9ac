// One case of dump_cases.py: inputs of the C++ entry points and the expected answers. Every array
// has its own heap block of exactly its size, so that a sanitizer notices an access just beyond its
// end.
#pragma once

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/operators.h"

namespace sanitize {

using adapmixed::Dtype;
using adapmixed::Logits;
using adapmixed::Shape;

class Reader {
 public:
  explicit Reader(const char* path) : file_(std::fopen(path, "rb")) {
    if (file_ == nullptr) throw std::runtime_error(std::string("cannot open ") + path);
    char magic[8];
    read(magic, sizeof magic);
    if (std::string(magic, sizeof magic) != "ADPMXC01") throw std::runtime_error("not a dump");
  }
  ~Reader() { std::fclose(file_); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  template <class T>
  std::vector<T> array() {
    std::int64_t count = 0, size = 0;
    header(count, size);
    if (size != sizeof(T)) throw std::runtime_error("an array of another type was expected");
    std::vector<T> values(static_cast<std::size_t>(count));
    read(values.data(), values.size() * sizeof(T));
    return values;
  }

  // Reads elements of any size.
  std::vector<char> bytes() {
    std::int64_t count = 0, size = 0;
    header(count, size);
    std::vector<char> values(static_cast<std::size_t>(count * size));
    read(values.data(), values.size());
    return values;
  }

  std::int64_t integer() { return array<std::int64_t>().at(0); }

 private:
  void header(std::int64_t& count, std::int64_t& size) {
    read(&count, sizeof count);
    read(&size, sizeof size);
  }
  void read(void* to, std::size_t size) {
    if (size > 0 && std::fread(to, 1, size, file_) != size) throw std::runtime_error("cut short");
  }

  std::FILE* file_;
};

struct Rows {
  std::int64_t stride_model, stride_position;
  Dtype dtype;
  std::vector<char> memory;
  std::vector<double> lse;
  std::vector<std::int32_t> status;

  explicit Rows(Reader& in) {
    const auto header = in.array<std::int64_t>();
    stride_model = header.at(0), stride_position = header.at(1);
    dtype = static_cast<Dtype>(header.at(2));
    memory = in.bytes();
    lse = in.array<double>();
    status = in.array<std::int32_t>();
  }
  Logits logits() const { return {memory.data(), stride_model, stride_position, dtype}; }
  // The rows of one model, as a tensor without the model axis.
  Logits of_model(std::int64_t model) const {
    const std::int64_t size = dtype == Dtype::f32 ? 4 : 2;
    return {memory.data() + model * stride_model * size, 0, stride_position, dtype};
  }
};

struct Loss {
  std::vector<double> orders;
  bool zero_out;
  std::int64_t num_models;
  std::vector<double> loss;

  explicit Loss(Reader& in) : orders(in.array<double>()) {
    const auto options = in.array<std::int64_t>();
    zero_out = options.at(0) != 0, num_models = options.at(1);
    loss = in.array<double>();
  }
};

struct Weighted {
  std::vector<double> ball;  // order and radius; empty if project did not make the weights
  std::vector<double> weight, mixture, log_prob;
  std::vector<Loss> losses;

  explicit Weighted(Reader& in)
      : ball(in.array<double>()),
        weight(in.array<double>()),
        mixture(in.array<double>()),
        log_prob(in.array<double>()) {
    for (std::int64_t left = in.integer(); left > 0; --left) losses.emplace_back(in);
  }
};

struct Pool {
  double lower, upper, scale;
  std::int64_t num_models;
  std::vector<char> active;
  std::vector<double> log_normaliser, span, log_weights;

  explicit Pool(Reader& in) {
    const auto numbers = in.array<double>();
    lower = numbers.at(0), upper = numbers.at(1), scale = numbers.at(2);
    num_models = in.integer();
    active = in.array<char>();
    for (auto* values : {&log_normaliser, &span, &log_weights}) {
      *values = in.array<double>();
    }
  }
};

struct Screen {
  double weight, order, threshold;
  std::int64_t top_k, num_models;
  std::vector<double> noise, divergence;
  std::vector<std::int64_t> tokens;
  std::vector<char> active;

  explicit Screen(Reader& in) {
    const auto numbers = in.array<double>();
    weight = numbers.at(0), order = numbers.at(1), threshold = numbers.at(2);
    const auto integers = in.array<std::int64_t>();
    top_k = integers.at(0), num_models = integers.at(1);
    noise = in.array<double>();
    tokens = in.array<std::int64_t>();
    active = in.array<char>();
    divergence = in.array<double>();
  }
};

struct Box {
  double lower, upper;
  std::int64_t num_models;
  std::vector<double> orders;
  std::vector<char> active;
  std::vector<double> log_scale, residual, charge, mixture, loss;

  explicit Box(Reader& in) {
    const auto numbers = in.array<double>();
    lower = numbers.at(0), upper = numbers.at(1);
    num_models = in.integer();
    orders = in.array<double>();
    active = in.array<char>();
    log_scale = in.array<double>();
    residual = in.array<double>();
    charge = in.array<double>();
    mixture = in.array<double>();
    loss = in.array<double>();
  }
};

struct Case {
  std::string name;
  Shape shape;
  Rows private_rows, public_rows;
  std::vector<std::int64_t> targets;
  bool good;  // false: some rows are bad, and no answers follow
  std::vector<Weighted> weighted;
  std::vector<Pool> pools;
  std::vector<Box> boxes;
  std::vector<double> orders, forward, backward;  // renyi_divergence
  std::vector<Screen> screens;
  std::vector<std::uint8_t> key;
  std::uint64_t counter = 0;
  std::vector<double> probabilities;
  std::vector<std::int64_t> tokens;
  std::vector<std::vector<double>> normals;  // gaussian, sigma 0.7

  explicit Case(Reader& in)
      : name(text(in)),
        shape(shape_of(in)),
        private_rows(in),
        public_rows(in),
        targets(in.array<std::int64_t>()),
        good(in.integer() != 0) {
    if (!good) return;
    for (std::int64_t left = in.integer(); left > 0; --left) weighted.emplace_back(in);
    for (std::int64_t left = in.integer(); left > 0; --left) pools.emplace_back(in);
    for (std::int64_t left = in.integer(); left > 0; --left) boxes.emplace_back(in);
    orders = in.array<double>();
    forward = in.array<double>();
    backward = in.array<double>();
    for (std::int64_t left = in.integer(); left > 0; --left) screens.emplace_back(in);
    key = in.array<std::uint8_t>();
    counter = static_cast<std::uint64_t>(in.integer());
    probabilities = in.array<double>();
    tokens = in.array<std::int64_t>();
    for (std::int64_t left = in.integer(); left > 0; --left) normals.push_back(in.array<double>());
  }

 private:
  static std::string text(Reader& in) {
    const std::vector<char> bytes = in.bytes();
    return std::string(bytes.begin(), bytes.end());
  }
  static Shape shape_of(Reader& in) {
    const auto sizes = in.array<std::int64_t>();
    return {sizes.at(0), sizes.at(1), sizes.at(2)};
  }
};

}  // namespace sanitize
