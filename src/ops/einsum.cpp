// einsum: sums of products by index letters, as permutes, reshapes and one matmul for each further operand.
#include <algorithm>
#include <map>

#include "ops/axes.h"
#include "ops/families.h"

namespace fulmen {

std::vector<OpDef> einsum_ops();

namespace {

// Letters of each operand and of the result, with every "..." replaced by characters below 'A' (one a dim, aligned at
// the right), so that the rest sees plain letters only.
struct Equation {
  std::vector<std::string> operands;
  std::string result;
};

using Fail = std::function<void(const std::string&)>;

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// "ij,jk->ik" for operands of the given ranks. `fail` throws.
Equation parse_equation(const std::string& text, const std::vector<int>& ranks, const Fail& fail) {
  std::string plain;
  for (char c : text)
    if (c != ' ') plain += c;
  const size_t arrow = plain.find("->");
  std::string left = plain.substr(0, arrow);
  std::vector<std::string> parts{""};
  for (char c : left) {
    if (c == ',')
      parts.emplace_back();
    else
      parts.back() += c;
  }
  if (parts.size() != ranks.size())
    fail("equation '" + text + "' names " + std::to_string(parts.size()) + " operands, got " + std::to_string(ranks.size()));
  const auto check_letters = [&](const std::string& part, const std::string& where) {
    const size_t dots = part.find("...");
    for (size_t i = 0; i < part.size(); ++i) {
      if (dots != std::string::npos && i >= dots && i < dots + 3) continue;
      if (!is_letter(part[i])) fail("equation '" + text + "' has '" + part[i] + "' in " + where + ", needed letters or '...'");
    }
  };
  size_t ellipsis_rank = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    check_letters(parts[i], "operand " + std::to_string(i));
    const size_t dots = parts[i].find("...");
    const size_t letters = parts[i].size() - (dots == std::string::npos ? 0 : 3);
    const auto rank = static_cast<size_t>(ranks[i]);
    if (dots == std::string::npos ? letters != rank : letters > rank)
      fail("operands[" + std::to_string(i) + "] has " + std::to_string(rank) + " dims, '" + parts[i] + "' names " +
           std::to_string(letters) + (dots == std::string::npos ? "" : " or more"));
    if (dots != std::string::npos) ellipsis_rank = std::max(ellipsis_rank, rank - letters);
  }
  const auto ellipsis = [&](size_t count) {
    std::string letters;
    for (size_t k = ellipsis_rank - count; k < ellipsis_rank; ++k) letters += static_cast<char>(1 + k);
    return letters;
  };
  Equation equation;
  for (size_t i = 0; i < parts.size(); ++i) {
    std::string part = parts[i];
    const size_t dots = part.find("...");
    if (dots != std::string::npos) part.replace(dots, 3, ellipsis(static_cast<size_t>(ranks[i]) - (part.size() - 3)));
    equation.operands.push_back(part);
  }
  if (arrow != std::string::npos) {
    equation.result = plain.substr(arrow + 2);
    check_letters(equation.result, "the result");
    const size_t dots = equation.result.find("...");
    if (dots != std::string::npos) equation.result.replace(dots, 3, ellipsis(ellipsis_rank));
  } else {
    // PyTorch's implicit form: the ellipsis, then the letters that occur once, sorted with capitals first.
    std::map<char, int> counts;
    for (const std::string& part : equation.operands)
      for (char c : part)
        if (is_letter(c)) ++counts[c];
    equation.result = ellipsis(ellipsis_rank);
    for (const auto& [letter, count] : counts)
      if (count == 1) equation.result += letter;
  }
  for (size_t i = 0; i < equation.result.size(); ++i) {
    const char c = equation.result[i];
    if (equation.result.find(c, i + 1) != std::string::npos) fail("equation '" + text + "' names '" + c + "' twice in the result");
    bool known = !is_letter(c);
    for (const std::string& part : equation.operands) known |= part.find(c) != std::string::npos;
    if (!known) fail("equation '" + text + "' has '" + c + "' in the result only, needed in an operand too");
  }
  return equation;
}

std::map<char, int64_t> letter_sizes(const Equation& equation, const std::vector<Dims>& shapes, const Fail& fail) {
  std::map<char, int64_t> sizes;
  for (size_t i = 0; i < shapes.size(); ++i)
    for (size_t d = 0; d < shapes[i].size(); ++d) {
      const char letter = equation.operands[i][d];
      const auto [at, fresh] = sizes.emplace(letter, shapes[i][d]);
      if (fresh || at->second == shapes[i][d] || shapes[i][d] == 1) continue;
      if (at->second != 1)
        fail((is_letter(letter) ? std::string("'") + letter + "'" : std::string("a dim of '...'")) + " has size " + std::to_string(at->second) +
             " and, in operands[" + std::to_string(i) + "], " + std::to_string(shapes[i][d]) + "; needed equal or 1");
      at->second = shapes[i][d];
    }
  return sizes;
}

// A value and the letter of each of its dims; no letter twice.
struct Term {
  ValueId value;
  std::string letters;
};

// Takes the diagonal of letters that stand twice: sum(where(index_a == index_b, x, 0)) over the second.
Term without_repeats(Builder& b, Term term) {
  for (size_t i = 0; i < term.letters.size(); ++i) {
    const size_t j = term.letters.find(term.letters[i], i + 1);
    if (j == std::string::npos) continue;
    const TensorType type = b.type(term.value);
    const auto line = [&](size_t dim) { return count_along(b, type.shape[dim], type.rank(), static_cast<int64_t>(dim), term.value); };
    const ValueId same = b.emit1("eq", {line(i), line(j)});
    const ValueId diagonal = b.where(same, term.value, b.number(0.0, type.dtype));
    term.value = b.convert(b.sum(diagonal, {static_cast<int64_t>(j)}, false), type.dtype);
    term.letters.erase(j, 1);
    --i;
  }
  return term;
}

Term summed(Builder& b, Term term, const std::string& kept) {
  Dims dims;
  std::string letters;
  for (size_t i = 0; i < term.letters.size(); ++i) {
    if (kept.find(term.letters[i]) == std::string::npos)
      dims.push_back(static_cast<int64_t>(i));
    else
      letters += term.letters[i];
  }
  if (dims.empty()) return term;
  const DType dtype = b.type(term.value).dtype;
  return {b.convert(b.sum(term.value, dims, false), dtype), letters};
}

// Dims in the order of `letters`; a letter that the term lacks becomes a dim of size 1.
ValueId arranged(Builder& b, const Term& term, const std::string& letters) {
  Dims order, shape;
  for (char c : letters) {
    const size_t at = term.letters.find(c);
    if (at != std::string::npos) order.push_back(static_cast<int64_t>(at));
    shape.push_back(at == std::string::npos ? 1 : b.type(term.value).shape[at]);
  }
  return b.reshape(b.permute(term.value, order), shape);
}

// Product of two terms, summed over the letters that only they have: letters are batch (in both, kept), left, right
// (in one, kept) or inner (in both, not kept).
Term product(Builder& b, Term x, Term y, const std::string& kept) {
  x = summed(b, x, kept + y.letters);
  y = summed(b, y, kept + x.letters);
  std::string batch, left, right, inner;
  for (char c : x.letters) {
    const bool shared = y.letters.find(c) != std::string::npos;
    (shared ? (kept.find(c) != std::string::npos ? batch : inner) : left) += c;
  }
  for (char c : y.letters)
    if (x.letters.find(c) == std::string::npos) right += c;
  // An inner letter of size 1 in one operand and more in the other broadcasts; batch letters are matmul's business.
  const auto spread = [&](const Term& term, const Term& other) {
    Dims shape = b.type(term.value).shape;
    for (size_t i = 0; i < shape.size(); ++i)
      if (shape[i] == 1 && inner.find(term.letters[i]) != std::string::npos)
        shape[i] = b.type(other.value).shape[other.letters.find(term.letters[i])];
    return Term{b.expand(term.value, shape), term.letters};
  };
  x = spread(x, y);
  y = spread(y, x);
  const auto sizes = [&](const Term& term, const std::string& letters) {
    Dims dims;
    for (char c : letters) dims.push_back(b.type(term.value).shape[term.letters.find(c)]);
    return dims;
  };
  Dims shape_x = sizes(x, batch), shape_y = sizes(y, batch);
  const int64_t inner_size = element_count(sizes(x, inner));
  shape_x.push_back(element_count(sizes(x, left)));
  shape_x.push_back(inner_size);
  shape_y.push_back(inner_size);
  shape_y.push_back(element_count(sizes(y, right)));
  Dims shape = *broadcast_shapes(sizes(x, batch), sizes(y, batch));
  for (int64_t n : sizes(x, left)) shape.push_back(n);
  for (int64_t n : sizes(y, right)) shape.push_back(n);
  const ValueId left_matrix = b.reshape(arranged(b, x, batch + left + inner), shape_x);
  const ValueId right_matrix = b.reshape(arranged(b, y, batch + inner + right), shape_y);
  return {b.reshape(b.matmul(left_matrix, right_matrix), shape), batch + left + right};
}

std::vector<ValueId> build_einsum(Builder& b, const Node& node) {
  const Fail fail = [](const std::string& message) { throw InternalError("internal: einsum: " + message); };
  std::vector<int> ranks;
  std::vector<Dims> shapes;
  for (ValueId id : node.inputs) {
    ranks.push_back(b.type(id).rank());
    shapes.push_back(b.type(id).shape);
  }
  const Equation equation = parse_equation(node.attrs.get_text("equation"), ranks, fail);
  const auto all_sizes = letter_sizes(equation, shapes, fail);
  Term term = without_repeats(b, {node.inputs[0], equation.operands[0]});
  for (size_t i = 1; i < node.inputs.size(); ++i) {
    std::string kept = equation.result;
    for (size_t j = i + 1; j < node.inputs.size(); ++j) kept += equation.operands[j];
    term = product(b, term, without_repeats(b, {node.inputs[i], equation.operands[i]}), kept);
  }
  term = summed(b, term, equation.result);
  Dims shape;
  for (char c : equation.result) shape.push_back(all_sizes.at(c));
  return {b.expand(arranged(b, term, equation.result), shape)};
}

}  // namespace

std::vector<OpDef> einsum_ops() {
  std::vector<OpDef> ops;
  ops.push_back({
      {.name = "einsum"},
      /*doc=*/
      "Sum of products by index letters: 'bhid,bhjd->bhij'. Letters that the result lacks are summed, a letter twice in an "
      "operand takes its diagonal, '...' stands for any dims (aligned at the right, broadcast), and without '->' the result has "
      "the letters that occur once, sorted. Operands are combined from left to right, each step one matmul.",
      /*operands=*/{{"operands", Need::variadic}},
      /*attributes=*/{{"equation", AttrKind::text, std::nullopt}},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        if (call.inputs.empty()) call.type_error("got no operands, needed 1 or more");
        std::vector<int> ranks;
        std::vector<Dims> shapes;
        for (size_t i = 0; i < call.inputs.size(); ++i) {
          ranks.push_back(call[i].rank());
          shapes.push_back(call[i].shape);
          if (i) need_same_dtype(call, 0, i);
        }
        const Fail fail = [&](const std::string& message) { call.shape_error(message); };
        const Equation equation = parse_equation(call.attrs.get_text("equation"), ranks, fail);
        const auto sizes = letter_sizes(equation, shapes, fail);
        Dims shape;
        for (char c : equation.result) shape.push_back(sizes.at(c));
        return {contiguous_type(call[0].dtype, shape)};
      },
      /*meaning=*/Decomposition{build_einsum},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::lower,
      /*samples=*/
      {{{"matrix", {"f32[5,7]", "f32[7,3]"}, {{"equation", std::string("ij,jk->ik")}}},
        {"scores", {"f32[2,3,5,7]", "f32[2,3,4,7]"}, {{"equation", std::string("bhid,bhjd->bhij")}}},
        {"implicit", {"f32[5,7]", "f32[7,3]"}, {{"equation", std::string("ij,jk")}}},
        {"transpose", {"f32[5,7]"}, {{"equation", std::string("ij->ji")}}},
        {"trace", {"f32[5,5]"}, {{"equation", std::string("ii->")}}},
        {"diagonal", {"f32[5,5,2]"}, {{"equation", std::string("iik->ki")}}},
        {"outer", {"f32[5]", "f32[3]"}, {{"equation", std::string("i,j->ij")}}},
        {"sum_all", {"f32[5,7]"}, {{"equation", std::string("ij->")}}},
        {"ellipsis", {"f32[2,3,5,7]", "f32[3,7,4]"}, {{"equation", std::string("...ij,...jk->...ik")}}},
        {"three", {"f32[2,5]", "f32[5,7]", "f32[7,3]"}, {{"equation", std::string("ij,jk,kl->il")}}},
        {"summed_alone", {"f32[2,5,3]", "f32[5,7]"}, {{"equation", std::string("ijs,jk->ik")}}},
        {"elementwise", {"f32[5,7]", "f32[5,7]"}, {{"equation", std::string("ij,ij->ij")}}},
        {"bf16", {"bf16[5,17]", "bf16[17,3]"}, {{"equation", std::string("ij,jk->ik")}}}},
       {{{"count", {"f32[5,7]"}, {{"equation", std::string("ij,jk->ik")}}}, "ShapeError", "names 2 operands, got 1"},
        {{"rank", {"f32[5,7]"}, {{"equation", std::string("ijk->i")}}}, "ShapeError", "operands[0] has 2 dims, 'ijk' names 3"},
        {{"sizes", {"f32[5,7]", "f32[6,3]"}, {{"equation", std::string("ij,jk->ik")}}}, "ShapeError", "'j' has size 7"},
        {{"unknown", {"f32[5,7]"}, {{"equation", std::string("ij->ik")}}}, "ShapeError", "'k' in the result only"},
        {{"twice", {"f32[5,7]"}, {{"equation", std::string("ij->ii")}}}, "ShapeError", "names 'i' twice"},
        {{"sign", {"f32[5,7]"}, {{"equation", std::string("i+->i")}}}, "ShapeError", "has '+' in operand 0"}}},
      /*torch=*/{},
  });
  return ops;
}

}  // namespace fulmen
