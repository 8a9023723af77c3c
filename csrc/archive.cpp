#include "csrc/archive.h"

#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "csrc/checks.h"

namespace kvq {

Handles<Archive>& archives() {
  static auto* handles = new Handles<Archive>("archive");  // outlives the threads that run at exit
  return *handles;
}

ScalarType scalar_type(Float type) {
  switch (type) {
    case Float::kFloat32:
      return ScalarType::Float;
    case Float::kFloat16:
      return ScalarType::Half;
    default:
      return ScalarType::BFloat16;
  }
}

namespace {

int64_t archive_create(int64_t file, int64_t budget, int64_t end) {
  auto pages = file < 0 ? nullptr : std::make_unique<PageFile>(static_cast<int>(file));
  return archives().add(
      std::make_shared<Archive>(std::make_shared<PageStore>(std::move(pages), budget, end)));
}

int64_t archive_fork(int64_t handle) {
  const auto archive = archives().find(handle);
  return archive ? archives().add(archive->fork()) : handle;
}

void archive_close(int64_t handle) { archives().remove(handle); }

std::string archive_error(int64_t handle) {
  const auto archive = archives().find(handle);
  if (!archive) return "it belongs to the process that was forked";
  const PageStore::Lock lock = archive->store().lock();
  return archive->store().error();
}

std::tuple<int64_t, int64_t> archive_bytes(int64_t handle) {
  const auto archive = archives().find(handle);
  if (!archive) return {0, 0};
  const PageStore::Lock lock = archive->store().lock();
  return {archive->store().bytes(), archive->store().memory_bytes()};
}

bool archive_append(int64_t handle, int64_t layer, const Tensor& key, const Tensor& value) {
  const Float type = check_new_tokens(key, value);
  const auto archive = archives().find(handle);
  if (!archive) return false;
  const Tensor k = with_contiguous_rows(key), v = with_contiguous_rows(value);
  return archive->append(layer, {type, key.size(1), key.size(3), value.size(3)}, key.size(0),
                         new_tokens(k), new_tokens(v), key.size(2));
}

void check_places(const Tensor& row, const Tensor& head, const Tensor& token) {
  for (const auto& [name, tensor] :
       {std::pair<const char*, const Tensor&>{"row", row}, {"head", head}, {"token", token}}) {
    check_rank(name, tensor, 1);
    check_dtype(name, tensor, ScalarType::Long);
    check_size(name, tensor, 0, row.size(0), "row.shape[0]");
  }
}

std::vector<Tensor> archive_read(int64_t handle, int64_t layer, const Tensor& row,
                                 const Tensor& head, const Tensor& token) {
  check_places(row, head, token);
  const auto archive = archives().find(handle);
  if (!archive) return {};
  const auto extent = archive->extent(layer);
  if (!extent) value_error("layer " + std::to_string(layer) + " of the archive is empty");
  const ArchiveShape& shape = extent->shape;
  const int64_t count = row.size(0), key_bytes = shape.key_bytes();
  Tensor key = empty({count, shape.key_dim}, scalar_type(shape.type));
  Tensor value = empty({count, shape.value_dim}, scalar_type(shape.type));
  Tensor found = empty({count}, ScalarType::Bool);
  const Tensor rows = contiguous(row), heads = contiguous(head), tokens = contiguous(token);
  auto* key_to = static_cast<uint8_t*>(key.mutable_data_ptr());
  auto* value_to = static_cast<uint8_t*>(value.mutable_data_ptr());
  auto* found_to = static_cast<bool*>(found.mutable_data_ptr());
  std::vector<uint8_t> data(static_cast<size_t>(shape.token_bytes()));
  for (int64_t i = 0; i < count; ++i) {
    const PinnedToken source =
        archive->pin(layer, rows.const_data_ptr<int64_t>()[i], heads.const_data_ptr<int64_t>()[i],
                     tokens.const_data_ptr<int64_t>()[i]);
    found_to[i] = source.read(data.data());
    if (!found_to[i]) std::fill(data.begin(), data.end(), uint8_t{0});
    const auto value_at = data.begin() + key_bytes;
    key_to = std::copy(data.begin(), value_at, key_to);
    value_to = std::copy(value_at, data.end(), value_to);
  }
  return {key, value, found};
}

void archive_crop(int64_t handle, int64_t layer, int64_t tokens) {
  check_not_negative("tokens", tokens);
  if (const auto archive = archives().find(handle)) archive->crop(layer, tokens);
}

void archive_reorder(int64_t handle, int64_t layer, std::vector<int64_t> index) {
  if (const auto archive = archives().find(handle)) archive->reorder(layer, index);
}

void archive_reset(int64_t handle, int64_t layer) {
  if (const auto archive = archives().find(handle)) archive->reset(layer);
}

void archive_flush(int64_t handle) {
  if (const auto archive = archives().find(handle)) archive->flush();
}

bool archive_keep(int64_t handle) {
  const auto archive = archives().find(handle);
  if (!archive) return false;
  archive->keep();
  return !archive->store().failed();
}

int64_t archive_reserve(int64_t handle, int64_t bytes) {
  const auto archive = archives().find(handle);
  if (!archive) return -1;
  const PageStore::Lock lock = archive->store().lock();
  return archive->store().reserve(bytes);
}

// Rows, tokens, KV heads, dims of key and value, number of the dtype; nothing before the first
// append.
std::vector<int64_t> archive_extent(int64_t handle, int64_t layer) {
  const auto archive = archives().find(handle);
  const auto extent = archive ? archive->extent(layer) : std::nullopt;
  if (!extent) return {};
  const ArchiveShape& shape = extent->shape;
  return {extent->batch, extent->tokens,  shape.kv_heads,
          shape.key_dim, shape.value_dim, static_cast<int64_t>(shape.type)};
}

std::vector<int64_t> archive_offsets(int64_t handle, int64_t layer) {
  const auto archive = archives().find(handle);
  return archive ? archive->offsets(layer) : std::vector<int64_t>{};
}

void archive_restore(int64_t handle, int64_t layer, std::vector<int64_t> extent,
                     std::vector<int64_t> offsets) {
  const auto archive = archives().find(handle);
  if (!archive) return;
  if (extent.size() != 6)
    value_error("extent must have 6 numbers, got " + std::to_string(extent.size()));
  for (const int64_t number : extent) check_not_negative("extent", number);
  check_head_dim("key_dim", extent[3]);
  check_head_dim("value_dim", extent[4]);
  if (extent[5] > static_cast<int64_t>(Float::kBFloat16))
    value_error("dtype must be at most 2, got " + std::to_string(extent[5]));
  const int64_t pages = extent[0] * ((extent[1] + kTileTokens - 1) / kTileTokens);
  if (static_cast<int64_t>(offsets.size()) != pages)
    value_error("offsets must have " + std::to_string(pages) + " numbers, got " +
                std::to_string(offsets.size()));
  archive->restore(layer, {static_cast<Float>(extent[5]), extent[2], extent[3], extent[4]},
                   extent[0], extent[1], offsets);
}

}  // namespace
}  // namespace kvq

STABLE_TORCH_LIBRARY_IMPL(kvq, CompositeExplicitAutograd, m) {
  m.impl("_archive_create", TORCH_BOX(&kvq::archive_create));
  m.impl("_archive_fork", TORCH_BOX(&kvq::archive_fork));
  m.impl("_archive_close", TORCH_BOX(&kvq::archive_close));
  m.impl("_archive_error", TORCH_BOX(&kvq::archive_error));
  m.impl("_archive_bytes", TORCH_BOX(&kvq::archive_bytes));
  m.impl("_archive_crop", TORCH_BOX(&kvq::archive_crop));
  m.impl("_archive_reorder", TORCH_BOX(&kvq::archive_reorder));
  m.impl("_archive_reset", TORCH_BOX(&kvq::archive_reset));
  m.impl("_archive_flush", TORCH_BOX(&kvq::archive_flush));
  m.impl("_archive_keep", TORCH_BOX(&kvq::archive_keep));
  m.impl("_archive_reserve", TORCH_BOX(&kvq::archive_reserve));
  m.impl("_archive_extent", TORCH_BOX(&kvq::archive_extent));
  m.impl("_archive_offsets", TORCH_BOX(&kvq::archive_offsets));
  m.impl("_archive_restore", TORCH_BOX(&kvq::archive_restore));
}

STABLE_TORCH_LIBRARY_IMPL(kvq, CPU, m) {
  m.impl("_archive_append", TORCH_BOX(&kvq::archive_append));
  m.impl("_archive_read", TORCH_BOX(&kvq::archive_read));
}
