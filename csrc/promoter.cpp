#include "ops_cpu/promoter.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "csrc/archive.h"
#include "csrc/checks.h"

namespace kvq {
namespace {

Handles<Promoter>& promoters() {
  static auto* handles = new Handles<Promoter>("promoter");
  return *handles;
}

int64_t promoter_create(int64_t archive_handle, int64_t cooldown, int64_t budget, int64_t retries,
                        double margin, bool synchronous) {
  const auto archive = archives().find(archive_handle);
  if (!archive) return promoters().add(nullptr);
  const PromoterRule rule{cooldown, budget, retries, static_cast<float>(margin)};
  return promoters().add(std::make_shared<Promoter>(archive, rule, synchronous));
}

void promoter_close(int64_t handle) { promoters().remove(handle); }

void check_owner(const char* name, const Tensor& tensor, const Tensor& index) {
  check_dtype(name, tensor, ScalarType::Float);
  check_size(name, tensor, 0, index.size(0), "index.shape[0]");
  check_size(name, tensor, 1, index.size(1), "index.shape[1]");
}

// False when the archive has failed.
bool promoter_submit(int64_t handle, int64_t layer, const Tensor& index, const Tensor& score,
                     const Tensor& near_score, std::optional<Tensor> start) {
  check_rank("index", index, 3);
  check_rank("score", score, 3);
  check_rank("near_score", near_score, 2);
  check_dtype("index", index, ScalarType::Int);
  check_owner("score", score, index);
  check_owner("near_score", near_score, index);
  check_size("score", score, 2, index.size(2), "index.shape[2]");
  if (start) {
    check_rank("start", *start, 1);
    check_dtype("start", *start, ScalarType::Int);
    check_size("start", *start, 0, index.size(0), "index.shape[0]");
  }
  const auto promoter = promoters().find(handle);
  if (!promoter) return false;
  const Tensor indices = contiguous(index), scores = contiguous(score);
  const Tensor nears = contiguous(near_score);
  std::optional<Tensor> starts;
  if (start) starts = contiguous(*start);
  promoter->submit(
      layer, {indices.const_data_ptr<int32_t>(), scores.const_data_ptr<float>(),
              nears.const_data_ptr<float>(), starts ? starts->const_data_ptr<int32_t>() : nullptr,
              index.size(0), index.size(1), index.size(2)});
  return !promoter->archive().store().failed();
}

// Row, head, token, key, value and score of what is ready; nothing when nothing is.
std::vector<Tensor> promoter_collect(int64_t handle, int64_t layer) {
  const auto promoter = promoters().find(handle);
  if (!promoter) return {};
  const std::vector<ReadyToken> ready = promoter->collect(layer);
  if (ready.empty()) return {};
  const ArchiveShape shape = promoter->archive().extent(layer)->shape;
  const auto count = static_cast<int64_t>(ready.size());
  Tensor row = empty({count}, ScalarType::Long), head = empty({count}, ScalarType::Long);
  Tensor token = empty({count}, ScalarType::Long), score = empty({count}, ScalarType::Float);
  Tensor key = empty({count, shape.key_dim}, scalar_type(shape.type));
  Tensor value = empty({count, shape.value_dim}, scalar_type(shape.type));
  auto* key_to = static_cast<uint8_t*>(key.mutable_data_ptr());
  auto* value_to = static_cast<uint8_t*>(value.mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    const Promotion& p = *ready[static_cast<size_t>(i)].promotion;
    row.mutable_data_ptr<int64_t>()[i] = ready[static_cast<size_t>(i)].row;
    head.mutable_data_ptr<int64_t>()[i] = p.head;
    token.mutable_data_ptr<int64_t>()[i] = p.token - p.start;
    score.mutable_data_ptr<float>()[i] = p.score;
    const auto value_at = p.data.begin() + shape.key_bytes();
    key_to = std::copy(p.data.begin(), value_at, key_to);
    value_to = std::copy(value_at, p.data.end(), value_to);
  }
  return {row, head, token, key, value, score};
}

void promoter_retry(int64_t handle, int64_t layer, std::vector<int64_t> places) {
  if (const auto promoter = promoters().find(handle)) promoter->retry(layer, places);
}

void promoter_wait(int64_t handle) {
  if (const auto promoter = promoters().find(handle)) promoter->wait();
}

}  // namespace
}  // namespace kvq

STABLE_TORCH_LIBRARY_IMPL(kvq, CompositeExplicitAutograd, m) {
  m.impl("_promoter_create", TORCH_BOX(&kvq::promoter_create));
  m.impl("_promoter_close", TORCH_BOX(&kvq::promoter_close));
  m.impl("_promoter_collect", TORCH_BOX(&kvq::promoter_collect));
  m.impl("_promoter_retry", TORCH_BOX(&kvq::promoter_retry));
  m.impl("_promoter_wait", TORCH_BOX(&kvq::promoter_wait));
}

STABLE_TORCH_LIBRARY_IMPL(kvq, CPU, m) {
  m.impl("_promoter_submit", TORCH_BOX(&kvq::promoter_submit));
}
