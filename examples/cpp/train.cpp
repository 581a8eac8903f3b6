// Trains a small network with no Python and no libtorch in the process: two spirals, told apart by a three-layer
// perceptron, with plain gradient descent on gradients that Fulmen made from the recorded program.
#include <cmath>
#include <cstdio>
#include <random>

#include <fulmen/fulmen.h>

using fulmen::Tensor;
using fulmen::Var;

namespace {

constexpr int64_t points = 256, hidden = 64;

Tensor random_weight(int64_t out, int64_t in, std::mt19937& generator) {
  Tensor weight({out, in});
  std::normal_distribution<float> normal(0.0f, std::sqrt(2.0f / static_cast<float>(in)));
  for (int64_t i = 0; i < weight.element_count(); ++i) weight.data<float>()[i] = normal(generator);
  return weight;
}

// Point i lies on spiral i % 2; the spirals wind one and a half times around the origin.
void make_spirals(Tensor& inputs, Tensor& labels, std::mt19937& generator) {
  std::normal_distribution<float> noise(0.0f, 0.02f);
  for (int64_t i = 0; i < points; ++i) {
    const float t = static_cast<float>(i / 2) / static_cast<float>(points / 2);
    const float angle = 9.4f * t + (i % 2 ? 3.14159f : 0.0f);
    inputs.data<float>()[2 * i] = t * std::cos(angle) + noise(generator);
    inputs.data<float>()[2 * i + 1] = t * std::sin(angle) + noise(generator);
    labels.data<int64_t>()[i] = i % 2;
  }
}

}  // namespace

int main() {
  std::mt19937 generator(1);
  Tensor inputs({points, 2}), labels({points}, "i64");
  make_spirals(inputs, labels, generator);
  std::vector<Tensor> weights = {random_weight(hidden, 2, generator),      Tensor({hidden}),
                                 random_weight(hidden, hidden, generator), Tensor({hidden}),
                                 random_weight(2, hidden, generator),      Tensor({2})};

  const std::vector<std::string> specs = {"f32[256,2]",    "i64[256]",  "f32[64,2]!", "f32[64]!",
                                          "f32[64,64]!", "f32[64]!", "f32[2,64]!", "f32[2]!"};
  const auto network = [](const std::vector<Var>& in) {
    const Var h = fulmen::relu(fulmen::linear(in[0], in[2], in[3]));
    return fulmen::linear(fulmen::relu(fulmen::linear(h, in[4], in[5])), in[6], in[7]);
  };
  const auto logits_of = fulmen::compile(specs, [&](const std::vector<Var>& in) { return std::vector<Var>{network(in)}; });
  const auto loss_of = fulmen::compile(
      specs, [&](const std::vector<Var>& in) { return std::vector<Var>{fulmen::cross_entropy(network(in), in[1])}; });

  const auto arguments = [&] {
    std::vector<Tensor> all = {inputs, labels};
    all.insert(all.end(), weights.begin(), weights.end());
    return all;
  };
  constexpr int steps = 1500;
  for (int i = 0; i <= steps; ++i) {
    const auto result = loss_of.value_and_gradients(arguments());
    if (i % 300 == 0) std::printf("step %4d  loss %.4f\n", i, static_cast<double>(result.values[0].data<float>()[0]));
    for (size_t w = 0; w < weights.size(); ++w)
      for (int64_t k = 0; k < weights[w].element_count(); ++k)
        weights[w].data<float>()[k] -= 0.2f * result.gradients[w].data<float>()[k];
  }

  const Tensor logits = logits_of(arguments())[0];
  int right = 0;
  for (int64_t i = 0; i < points; ++i) {
    const float* row = logits.data<float>() + 2 * i;
    right += (row[1] > row[0]) == (labels.data<int64_t>()[i] == 1);
  }
  std::printf("%d of %d points on the right spiral\n", right, static_cast<int>(points));
  std::printf("%s", loss_of.explain().c_str());
  return right > points * 9 / 10 ? 0 : 1;
}
