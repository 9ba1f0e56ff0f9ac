// One row of function pointers per instruction set; dispatch.cpp chooses the row once per process.
#pragma once

#include "common/config.h"
#include "common/operators.h"

namespace adapmixed::cpu {

struct Table {
  const char* name;
  decltype(&cpu::log_sum_exp) log_sum_exp;
  decltype(&cpu::near_log_sum_exp) near_log_sum_exp;
  decltype(&cpu::project) project;
  decltype(&cpu::clip_project) clip_project;
  decltype(&cpu::leave_one_out) leave_one_out;
  decltype(&cpu::mixture) mixture;
  decltype(&cpu::log_prob) log_prob;
  decltype(&cpu::log_pool) log_pool;
  decltype(&cpu::pool_mixture) pool_mixture;
  decltype(&cpu::pool_probabilities) pool_probabilities;
  decltype(&cpu::pool_log_prob) pool_log_prob;
  decltype(&cpu::add_low_rank) add_low_rank;
  decltype(&cpu::cross_entropy) cross_entropy;
  decltype(&cpu::renyi_divergence) renyi_divergence;
  decltype(&cpu::screen) screen;
  decltype(&cpu::keystream) keystream;
  decltype(&cpu::gaussian) gaussian;
  decltype(&cpu::sample) sample;
};

}  // namespace adapmixed::cpu

ADAPMIXED_CORE_BEGIN
void add_log_sum_exp(cpu::Table& table);
void add_project(cpu::Table& table);
void add_clip_project(cpu::Table& table);
void add_leave_one_out(cpu::Table& table);
void add_mixture(cpu::Table& table);
void add_log_pool(cpu::Table& table);
void add_add_low_rank(cpu::Table& table);
void add_cross_entropy(cpu::Table& table);
void add_renyi_divergence(cpu::Table& table);
void add_screen(cpu::Table& table);
void add_sample(cpu::Table& table);
ADAPMIXED_CORE_END
