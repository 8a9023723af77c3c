// Archives against rows of plain numbers, and with a promoter while the decode thread goes on.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ops_cpu/archive.h"
#include "ops_cpu/promoter.h"
#include "ops_cpu/test/check.h"

namespace {

using namespace kvq;

constexpr ArchiveShape kShape{Float::kFloat32, 2, 32, 48};

std::unique_ptr<PageFile> temporary_file() {
  std::FILE* file = std::tmpfile();
  auto pages = std::make_unique<PageFile>(fileno(file));
  std::fclose(file);
  return pages;
}

std::shared_ptr<Archive> make_archive(bool in_file, int64_t budget = PageStore::kNoBudget) {
  return std::make_shared<Archive>(
      std::make_shared<PageStore>(in_file ? temporary_file() : nullptr, budget, 0));
}

// Rows of tokens, each a number of its own from which all its channels follow.
class Rows {
 public:
  std::vector<std::vector<int>> rows;

  explicit Rows(size_t batch) : rows(batch) {}

  bool append(Archive& archive, int64_t layer, int64_t tokens) {
    const auto batch = static_cast<int64_t>(rows.size());
    std::vector<float> key(batch * kShape.kv_heads * tokens * kShape.key_dim);
    std::vector<float> value(batch * kShape.kv_heads * tokens * kShape.value_dim);
    for (int64_t row = 0; row < batch; ++row)
      for (int64_t t = 0; t < tokens; ++t) {
        rows[row].push_back(++last_);
        for (int64_t head = 0; head < kShape.kv_heads; ++head) {
          const int64_t at = (row * kShape.kv_heads + head) * tokens + t;
          for (int64_t c = 0; c < kShape.key_dim; ++c)
            key[at * kShape.key_dim + c] = channel(last_, head, c);
          for (int64_t c = 0; c < kShape.value_dim; ++c)
            value[at * kShape.value_dim + c] = channel(last_, head, kShape.key_dim + c);
        }
      }
    const auto tokens_of = [&](const std::vector<float>& data, int64_t dim) {
      return NewTokens{data.data(), {kShape.kv_heads * tokens * dim, tokens * dim, dim}};
    };
    return archive.append(layer, kShape, batch, tokens_of(key, kShape.key_dim),
                          tokens_of(value, kShape.value_dim), tokens);
  }

  void crop(size_t tokens) {
    for (auto& row : rows) row.resize(std::min(row.size(), tokens));
  }

  void reorder(const std::vector<int64_t>& index) {
    std::vector<std::vector<int>> selected;
    for (const int64_t i : index) selected.push_back(rows[i]);
    rows = selected;
  }

  static bool holds(const uint8_t* data, int token, int64_t head) {
    const auto* x = reinterpret_cast<const float*>(data);
    bool ok = true;
    for (int64_t c = 0; c < kShape.key_dim + kShape.value_dim; ++c)
      ok &= x[c] == channel(token, head, c);
    return ok;
  }

  // Every token that is there is right; returns how many are.
  int64_t check(const Archive& archive, int64_t layer, const std::string& what) const {
    std::vector<uint8_t> data(kShape.token_bytes());
    int64_t found = 0;
    for (size_t row = 0; row < rows.size(); ++row)
      for (size_t t = 0; t < rows[row].size(); ++t)
        for (int64_t head = 0; head < kShape.kv_heads; ++head) {
          const PinnedToken token = archive.pin(layer, row, head, t);
          if (!token.read(data.data())) continue;
          ++found;
          expect(holds(data.data(), rows[row][t], head), what);
        }
    return found;
  }

  int64_t count() const {
    int64_t tokens = 0;
    for (const auto& row : rows) tokens += row.size();
    return tokens * kShape.kv_heads;
  }

 private:
  static float channel(int token, int64_t head, int64_t c) {
    return static_cast<float>((token * kShape.kv_heads + head) * 128 + c);
  }

  int last_ = 0;
};

void test_any_sequence(bool in_file) {
  const std::string what = in_file ? "archive in a file" : "archive in memory";
  const auto archive = make_archive(in_file);
  std::mt19937 dice(0);
  const auto roll = [&](int count) { return static_cast<int>(dice() % count); };
  Rows rows(2);
  rows.append(*archive, 3, 130);
  for (int i = 0; i < 60; ++i) {
    const int action = roll(4);
    if (action < 2) {
      rows.append(*archive, 3, action ? 1 : 1 + roll(100));
    } else if (action == 2) {
      const int64_t tokens = archive->extent(3)->tokens, kept = tokens - roll(tokens + 1) / 2;
      archive->crop(3, kept);
      rows.crop(kept);
    } else {
      std::vector<int64_t> index(1 + roll(3));
      for (int64_t& row : index) row = roll(static_cast<int>(rows.rows.size()));
      archive->reorder(3, index);
      rows.reorder(index);
    }
    if (i % 20 == 10) archive->flush();
    if (i % 10 == 0) expect(rows.check(*archive, 3, what) == rows.count(), what);
  }
  const auto fork = archive->fork();
  Rows forked = rows;
  forked.append(*fork, 3, 70);
  rows.append(*archive, 3, 50);
  expect(forked.check(*fork, 3, what) == forked.count(), what + ", forked");
  expect(rows.check(*archive, 3, what) == rows.count(), what + ", its origin");
  fork->reset(3);
  archive->reset(3);
  expect(archive->store().bytes() == 0, what + " gives all pages back");
}

void test_budget(bool in_file) {
  const int64_t page = kShape.page_bytes();
  const auto archive = make_archive(in_file, 5 * page);
  Rows first(1), second(1);
  first.append(*archive, 0, 64 * 8);
  second.append(*archive, 1, 64 * 8 + 1);
  expect(archive->store().bytes() <= 5 * page, "the budget holds");
  const int64_t a = first.check(*archive, 0, "what the budget left of a layer");
  const int64_t b = second.check(*archive, 1, "what the budget left of another");
  expect(a == 2 * 64 * kShape.kv_heads && b == (2 * 64 + 1) * kShape.kv_heads,
         "layers share the budget");
}

void test_failure() {
  const int full = open("/dev/full", O_RDWR);
  auto archive = std::make_shared<Archive>(
      std::make_shared<PageStore>(std::make_unique<PageFile>(full), PageStore::kNoBudget, 0));
  close(full);
  Rows rows(1);
  rows.append(*archive, 0, 100);
  archive->flush();
  expect(archive->store().failed(), "a full disk is noticed");
  expect(!rows.append(*archive, 0, 1), "nothing is appended on a full disk");
  rows.crop(100);
  expect(rows.check(*archive, 0, "tokens on a full disk") == 0, "a full disk holds no token");
  archive->reorder(0, {0, 0});
  archive->crop(0, 3);
  archive->reset(0);
}

// Steps of decoding: rows change places, tokens are cut, and others ask for tokens meanwhile.
void test_promoter(bool in_file) {
  const std::string what = "tokens promoted during decoding";
  const auto archive = make_archive(in_file);
  auto promoter = std::make_unique<Promoter>(archive, PromoterRule{2, 8, 3, 0.0f}, false);
  Rows rows(2);
  rows.append(*archive, 0, 300);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    std::vector<uint8_t> data(kShape.token_bytes());
    while (!stop) archive->pin(0, 0, 1, 17).read(data.data());
  });
  std::mt19937 dice(1);
  const float near_score[4] = {-5, -5, -5, -5};
  int64_t collected = 0;
  for (int step = 0; step < 400; ++step) {
    for (const ReadyToken& ready : promoter->collect(0)) {
      const Promotion& p = *ready.promotion;
      expect(Rows::holds(p.data.data(), rows.rows[ready.row][p.token], p.head), what);
      ++collected;
    }
    if (step % 50 == 7) promoter->retry(0, {});
    rows.append(*archive, 0, 1);
    int32_t index[12];
    float score[12];
    for (int i = 0; i < 12; ++i) {
      index[i] = static_cast<int32_t>(dice() % archive->extent(0)->tokens) - (i % 5 == 4);
      score[i] = -static_cast<float>(i % 3);
    }
    promoter->submit(0, {index, score, near_score, nullptr, 2, 2, 3});
    if (step % 3 == 0) {
      const std::vector<int64_t> index_of_rows = {step % 2, 1 - step % 2};
      archive->reorder(0, index_of_rows);
      rows.reorder(index_of_rows);
    }
    if (step % 31 == 30) {
      archive->crop(0, 290);
      rows.crop(290);
    }
    if (step % 4 == 3) promoter->wait();
  }
  stop = true;
  reader.join();
  expect(collected > 100, what + ", more than a hundred of them");
  promoter.reset();
  expect(rows.check(*archive, 0, what) == rows.count(), what);
}

// One thread appends and submits while another collects.
void test_two_callers() {
  const auto archive = make_archive(true);
  Promoter promoter(archive, {0, 8, 3, 0.0f}, false);
  Rows rows(1);
  rows.append(*archive, 0, 200);
  std::atomic<bool> stop{false};
  bool right = true;
  const std::vector<int> first = rows.rows[0];
  std::thread collector([&] {
    while (!stop)
      for (const ReadyToken& ready : promoter.collect(0)) {
        const Promotion& p = *ready.promotion;
        right &= Rows::holds(p.data.data(), first[p.token], p.head);
      }
  });
  const float near_score[2] = {-5, -5}, score[4] = {0, -1, -2, -3};
  for (int step = 0; step < 300; ++step) {
    const int32_t index[4] = {step % 200, (step * 7) % 200, (step * 3) % 200, step % 20};
    promoter.submit(0, {index, score, near_score, nullptr, 1, 2, 2});
    rows.append(*archive, 0, 1);
  }
  promoter.wait();
  stop = true;
  collector.join();
  expect(right, "tokens collected on another thread");
}

}  // namespace

void test_archive() {
  for (const bool in_file : {false, true}) {
    test_any_sequence(in_file);
    test_budget(in_file);
    test_promoter(in_file);
  }
  test_two_callers();
  test_failure();
  std::printf("archive      %s\n", failures ? "see above" : "holds what was appended");
}
