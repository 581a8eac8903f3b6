#include "passes/fuse.h"

#include <algorithm>
#include <map>
#include <queue>
#include <set>

#include "ops/table.h"
#include "passes/alias_views.h"

namespace fulmen {
namespace {

constexpr size_t largest_group = 96;             // nodes: beyond, tiles get too small to pay
constexpr size_t shared_input_bytes = 16 * 1024;  // reading a smaller value twice costs nothing

struct Group {
  std::vector<int> nodes;  // ascending
  const Executor* executor = nullptr;  // null: these nodes aren't fused
  std::shared_ptr<const Trace> body;   // of more than one node
  std::vector<ValueId> inputs, outputs;
  std::shared_ptr<const Plan> plan;
};

class Fuser {
 public:
  Fuser(const Trace& trace, const ExecutorList& executors, const Target& target) : trace_(trace), target_(target) {
    const int count = static_cast<int>(trace.nodes.size());
    producer_ = producers(trace);
    users_.resize(trace.values.size());
    for (int n = 0; n < count; ++n)
      for (ValueId id : trace.nodes[static_cast<size_t>(n)].inputs)
        if (id != no_value) users_[static_cast<size_t>(id)].push_back(n);
    is_output_.resize(trace.values.size());
    for (ValueId id : trace.outputs)
      if (id != no_value) is_output_[static_cast<size_t>(id)] = true;
    group_of_.assign(static_cast<size_t>(count), -1);
    for (int n = 0; n < count; ++n) {
      if (is_free(n)) continue;
      Group group;
      group.nodes = {n};
      for (const auto& executor : executors)
        if (executor->name() == node(n).executor && executor->can_fuse(call_of(trace, node(n)), target)) group.executor = executor.get();
      group_of_[static_cast<size_t>(n)] = static_cast<int>(groups_.size());
      groups_.push_back(std::move(group));
    }
  }

  Trace run() {
    for (int n = 0; n < static_cast<int>(trace_.nodes.size()); ++n) join_producers(n);
    join_readers();
    return rebuild();
  }

 private:
  const Node& node(int n) const { return trace_.nodes[static_cast<size_t>(n)]; }
  Group& group(int g) { return groups_[static_cast<size_t>(g)]; }

  // Views and constants run nowhere on their own account: groups copy them.
  bool is_free(int n) const { return node(n).executor == view_executor || (node(n).op->name == "full" && !node(n).executor.empty()); }

  // Nodes that a value comes from, through free ones; -1 for trace inputs is left out.
  void sources(ValueId id, std::vector<int>& out) const {
    if (id == no_value) return;
    const int n = producer_[static_cast<size_t>(id)];
    if (n < 0) return;
    if (!is_free(n)) {
      out.push_back(n);
      return;
    }
    for (ValueId input : node(n).inputs) sources(input, out);
  }
  std::vector<int> source_groups(int n) const {
    std::vector<int> nodes, result;
    for (ValueId id : node(n).inputs) sources(id, nodes);
    for (int source : nodes) {
      const int g = group_of_[static_cast<size_t>(source)];
      if (std::find(result.begin(), result.end(), g) == result.end()) result.push_back(g);
    }
    return result;
  }

  // Does the value reach anything but nodes of the set, through free nodes?
  bool leaves(ValueId id, const std::set<int>& members) const {
    if (is_output_[static_cast<size_t>(id)]) return true;
    for (int user : users_[static_cast<size_t>(id)]) {
      if (members.count(user)) continue;
      if (!is_free(user)) return true;
      for (ValueId result : node(user).outputs)
        if (result != no_value && leaves(result, members)) return true;
    }
    return false;
  }

  // --- legality ---

  // Would a group of these two wait for itself: is there a path from one to the other through a third?
  bool makes_cycle(int a, int b) {
    std::vector<int> pending;
    std::vector<bool> seen(groups_.size());
    const auto visit = [&](int g) {
      for (int n : group(g).nodes)
        for (int from : source_groups(n))
          if (from != g && from != a && from != b && !seen[static_cast<size_t>(from)]) seen[static_cast<size_t>(from)] = true, pending.push_back(from);
    };
    visit(a);
    visit(b);
    // Everything upstream of the pair, but for the pair itself: if that reads the pair, there is a way around.
    const int first = std::min(group(a).nodes.front(), group(b).nodes.front());
    while (!pending.empty()) {
      const int g = pending.back();
      pending.pop_back();
      if (group(g).nodes.back() < first) continue;  // nothing that early reads the pair
      for (int n : group(g).nodes)
        for (int from : source_groups(n)) {
          if (from == a || from == b) return true;
          if (from != g && !seen[static_cast<size_t>(from)]) seen[static_cast<size_t>(from)] = true, pending.push_back(from);
        }
    }
    return false;
  }

  // --- bodies ---

  class BodyBuilder {
   public:
    BodyBuilder(const Fuser& fuser, const std::vector<int>& nodes) : fuser_(fuser), members_(nodes.begin(), nodes.end()) {}

    void build(const std::vector<int>& nodes) {
      body = std::make_shared<Trace>();
      body->name = "fusion";
      for (int n : nodes) copy(n);
      for (int n : nodes)
        for (ValueId id : fuser_.node(n).outputs)
          if (id != no_value && fuser_.leaves(id, members_)) {
            outputs.push_back(id);
            body->outputs.push_back(map_.at(id));
          }
    }

    std::shared_ptr<Trace> body;
    std::vector<ValueId> inputs, outputs;  // of the whole trace

   private:
    // Does a free node lead back to the group, or is it made of constants?
    bool belongs(ValueId id) const {
      const int n = fuser_.producer_[static_cast<size_t>(id)];
      if (n < 0) return false;
      if (members_.count(n)) return true;
      if (!fuser_.is_free(n)) return false;
      if (fuser_.node(n).inputs.empty()) return true;
      for (ValueId input : fuser_.node(n).inputs)
        if (input != no_value && belongs(input)) return true;
      return false;
    }
    ValueId value(ValueId id) {
      if (id == no_value) return no_value;
      if (const auto found = map_.find(id); found != map_.end()) return found->second;
      if (belongs(id)) {
        copy(fuser_.producer_[static_cast<size_t>(id)]);
        return map_.at(id);
      }
      inputs.push_back(id);
      return map_[id] = body->add_input(fuser_.trace_.type(id), fuser_.trace_.value(id).name);
    }
    void copy(int n) {
      Node copied = fuser_.node(n);
      if (copied.outputs[0] != no_value && map_.count(copied.outputs[0])) return;
      for (ValueId& id : copied.inputs) id = value(id);
      for (ValueId& id : copied.outputs) {
        if (id == no_value) continue;
        const ValueId made = body->add_value(fuser_.trace_.type(id), fuser_.trace_.value(id).name);
        map_[id] = made;
        id = made;
      }
      copied.executor.clear();
      copied.plan.reset();
      body->nodes.push_back(std::move(copied));
    }

    const Fuser& fuser_;
    std::set<int> members_;
    std::map<ValueId, ValueId> map_;
  };

  // The group of both, if the executor claims it.
  bool join(int a, int b) {
    if (a == b) return true;
    Group& first = group(a);
    Group& second = group(b);
    if (!first.executor || first.executor != second.executor) return false;
    if (first.nodes.size() + second.nodes.size() > largest_group || makes_cycle(a, b)) return false;
    Group joined;
    joined.executor = first.executor;
    std::merge(first.nodes.begin(), first.nodes.end(), second.nodes.begin(), second.nodes.end(), std::back_inserter(joined.nodes));
    if (!claim(joined)) return false;
    for (int n : joined.nodes) group_of_[static_cast<size_t>(n)] = a;
    first = std::move(joined);
    second = Group{};
    return true;
  }

  bool claim(Group& joined) const {
    BodyBuilder builder(*this, joined.nodes);
    builder.build(joined.nodes);
    Call call;
    static const Attributes no_attributes;
    call.op = &require_op("fusion");
    call.attrs = &no_attributes;
    call.body = builder.body.get();
    for (ValueId id : builder.inputs) call.inputs.push_back(&trace_.type(id));
    for (ValueId id : builder.outputs) call.outputs.push_back(&trace_.type(id));
    Claim answer = joined.executor->claim(call, target_);
    if (!is_claimed(answer)) return false;
    joined.plan = std::make_shared<const Plan>(std::get<Plan>(std::move(answer)));
    joined.body = builder.body;
    joined.inputs = std::move(builder.inputs);
    joined.outputs = std::move(builder.outputs);
    return true;
  }

  void join_producers(int n) {
    if (is_free(n)) return;
    std::vector<int> from = source_groups(n);
    // Nearest first: what was made last is most likely to be in cache, and the least stands between.
    std::sort(from.begin(), from.end(), [&](int a, int b) { return group(a).nodes.back() > group(b).nodes.back(); });
    for (int g : from) {
      if (group(g).nodes.empty()) continue;
      join(g, group_of_[static_cast<size_t>(n)]);
    }
  }

  // Groups that read the same large value, one beside the other.
  void join_readers() {
    for (size_t id = 0; id < users_.size(); ++id) {
      if (users_[id].size() < 2 || trace_.values[id].type.bytes() < shared_input_bytes) continue;
      std::vector<int> readers;
      for (int user : users_[id]) {
        if (is_free(user)) continue;
        const int g = group_of_[static_cast<size_t>(user)];
        if (group(g).executor && std::find(readers.begin(), readers.end(), g) == readers.end()) readers.push_back(g);
      }
      for (size_t i = 0; i + 1 < readers.size(); ++i)
        if (join(readers[i], readers[i + 1])) readers[i + 1] = readers[i];
    }
  }

  // --- the new node list ---

  Trace rebuild() {
    // Units: fusions, nodes left alone, free nodes that somebody outside still reads.
    std::vector<Node> units;
    std::vector<int> positions;
    for (const Group& g : groups_) {
      if (g.nodes.empty()) continue;
      if (!g.body) {
        for (int n : g.nodes) units.push_back(node(n)), positions.push_back(n);
        continue;
      }
      Node fusion;
      fusion.op = &require_op("fusion");
      fusion.inputs = g.inputs;
      fusion.outputs = g.outputs;
      fusion.body = g.body;
      fusion.executor = g.executor->name();
      fusion.plan = g.plan;
      units.push_back(std::move(fusion));
      positions.push_back(g.nodes.back());
    }
    std::set<ValueId> read(trace_.outputs.begin(), trace_.outputs.end());
    for (const Node& unit : units) read.insert(unit.inputs.begin(), unit.inputs.end());
    for (int n = static_cast<int>(trace_.nodes.size()); n-- > 0;) {
      if (!is_free(n) || !read.count(node(n).outputs[0])) continue;
      units.push_back(node(n));
      positions.push_back(n);
      read.insert(node(n).inputs.begin(), node(n).inputs.end());
    }
    Trace out = trace_;
    out.nodes = in_order(std::move(units), positions);
    return out;
  }

  // Producers first; otherwise by the position of a unit's last node.
  std::vector<Node> in_order(std::vector<Node> units, const std::vector<int>& positions) const {
    std::map<ValueId, int> maker;
    for (size_t u = 0; u < units.size(); ++u)
      for (ValueId id : units[u].outputs)
        if (id != no_value) maker[id] = static_cast<int>(u);
    std::vector<int> waits(units.size());
    std::vector<std::vector<int>> readers(units.size());
    for (size_t u = 0; u < units.size(); ++u) {
      std::set<int> makers;
      for (ValueId id : units[u].inputs)
        if (const auto found = maker.find(id); found != maker.end()) makers.insert(found->second);
      waits[u] = static_cast<int>(makers.size());
      for (int m : makers) readers[static_cast<size_t>(m)].push_back(static_cast<int>(u));
    }
    using Entry = std::pair<int, int>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
    for (size_t u = 0; u < units.size(); ++u)
      if (waits[u] == 0) ready.push({positions[u], static_cast<int>(u)});
    std::vector<Node> ordered;
    while (!ready.empty()) {
      const int u = ready.top().second;
      ready.pop();
      ordered.push_back(std::move(units[static_cast<size_t>(u)]));
      for (int reader : readers[static_cast<size_t>(u)])
        if (--waits[static_cast<size_t>(reader)] == 0) ready.push({positions[static_cast<size_t>(reader)], reader});
    }
    FULMEN_CHECK(ordered.size() == units.size());
    return ordered;
  }

  const Trace& trace_;
  const Target& target_;
  std::vector<int> producer_;
  std::vector<std::vector<int>> users_;
  std::vector<bool> is_output_;
  std::vector<Group> groups_;
  std::vector<int> group_of_;
};

}  // namespace

Trace fuse(const Trace& trace, const ExecutorList& executors, const Target& target) { return Fuser(trace, executors, target).run(); }

}  // namespace fulmen
