// Which ranks of a group share a host.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace zipccl {

// Contributions to a sum are accumulated in rank order inside each host, and the hosts' sums in host order, whatever
// way they take: so the result does not depend on it.
class Hosts {
 public:
  Hosts() = default;
  // `names`: of each rank's host. Hosts are in the order of their first ranks.
  explicit Hosts(const std::vector<std::string>& names) : of_rank_(names.size()) {
    std::vector<std::string> known;
    for (size_t rank = 0; rank < names.size(); rank++) {
      const auto found = std::find(known.begin(), known.end(), names[rank]);
      of_rank_[rank] = static_cast<int>(found - known.begin());
      if (found == known.end()) {
        known.push_back(names[rank]);
        ranks_.emplace_back();
      }
      ranks_[of_rank_[rank]].push_back(static_cast<int>(rank));
    }
  }

  int count() const { return static_cast<int>(ranks_.size()); }
  std::vector<int> all() const {
    std::vector<int> ranks(of_rank_.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  int of(int rank) const { return of_rank_[rank]; }
  const std::vector<int>& ranks(int host) const { return ranks_[host]; }
  // Whether there is a way inside hosts first and then between them, on which each rank has one counterpart on each
  // other host.
  bool hierarchical() const {
    return count() > 1 && ranks_[0].size() > 1 && std::all_of(ranks_.begin(), ranks_.end(), [this](const auto& ranks) {
             return ranks.size() == ranks_[0].size();
           });
  }
  // The rank's place among those of its host.
  int place(int rank) const {
    const auto& mates = ranks_[of_rank_[rank]];
    return static_cast<int>(std::find(mates.begin(), mates.end(), rank) - mates.begin());
  }
  // Like "4 + 4": ranks of each host.
  std::string describe() const {
    std::string text;
    for (const auto& ranks : ranks_) text += (text.empty() ? "" : " + ") + std::to_string(ranks.size());
    return text;
  }
  // Ranks in the order of accumulation, in runs of one host each; where each host would have one rank, all in one run.
  std::vector<std::vector<int>> order(const std::vector<int>& members) const {
    std::vector<std::vector<int>> runs(count());
    for (int rank : members) runs[of(rank)].push_back(rank);
    runs.erase(std::remove_if(runs.begin(), runs.end(), [](const auto& run) { return run.empty(); }), runs.end());
    if (std::any_of(runs.begin(), runs.end(), [](const auto& run) { return run.size() > 1; })) return runs;
    std::vector<int> all;
    for (const auto& run : runs) all.push_back(run[0]);
    return {all};
  }

 private:
  std::vector<int> of_rank_;
  std::vector<std::vector<int>> ranks_;
};

}  // namespace zipccl
