//! A multilayer perceptron, written out: ReLU between layers, softmax and cross entropy at the end.
//!
//! Forward and backward are steps per layer, not one call, because the training loop sends a layer's
//! gradient off as soon as it is there and goes on with the layer before.
//!
//! Values and parameters are f32, gradients are f64. A product of two f32 is exact in f64, and so, nearly, is the
//! sum over a batch: the gradient does not depend on how ranks shared the batch and in which order their parts
//! were added. In f32 it would, in its last bit; and of the millions of times that a training asks whether a
//! neuron's input is above 0, that bit decides some, after which the difference is no longer a rounding error.

use crate::data::Dataset;
use crate::rng::Rng;

/// One fully connected layer.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    inputs: usize,
    outputs: usize,
    /// The weights, input by input, then the biases; the gradient of a layer has the same order.
    /// With this order all inner loops run over neighbouring numbers.
    pub(crate) params: Vec<f32>,
}

/// The network.
#[derive(Clone, Debug)]
pub(crate) struct Net {
    pub(crate) layers: Vec<Layer>,
}

/// How well a set of rows was classified.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Score {
    /// Sum of the rows' cross entropies.
    pub(crate) loss: f64,
    /// Rows whose most likely digit is the right one.
    pub(crate) correct: usize,
    /// Rows in all.
    pub(crate) rows: usize,
}

impl Score {
    pub(crate) fn add(&mut self, other: &Self) {
        self.loss += other.loss;
        self.correct += other.correct;
        self.rows += other.rows;
    }
}

/// What one pass over some rows leaves behind: the memory is allocated once and used for every batch.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    labels: Vec<u8>,
    /// The input of each layer, row by row, and at the end the output of the last.
    values: Vec<Vec<f32>>,
    /// For each layer the derivative of the loss by its output before the ReLU.
    deltas: Vec<Vec<f32>>,
}

impl Net {
    /// A network with layers of these widths, inputs first; all parameters are 0.
    pub(crate) fn zeroed(widths: &[usize]) -> Self {
        let layer = |w: &[usize]| Layer { inputs: w[0], outputs: w[1], params: vec![0.0; (w[0] + 1) * w[1]] };
        Self { layers: widths.windows(2).map(layer).collect() }
    }

    /// Draws the weights (He's uniform distribution); biases stay 0.
    pub(crate) fn init(&mut self, rng: &mut Rng) {
        for l in &mut self.layers {
            let limit = (6.0 / l.inputs as f32).sqrt();
            for w in &mut l.params[..l.inputs * l.outputs] {
                *w = rng.symmetric(limit);
            }
        }
    }

    /// All parameters, layer by layer.
    pub(crate) fn params(&self) -> Vec<f32> {
        self.layers.iter().flat_map(|l| l.params.iter().copied()).collect()
    }

    /// Computes all layers' outputs for the rows in `pass`.
    pub(crate) fn forward(&self, pass: &mut Pass) {
        for (i, l) in self.layers.iter().enumerate() {
            let (before, after) = pass.values.split_at_mut(i + 1);
            let (x, y) = (&before[i], &mut after[0]);
            y.resize(pass.labels.len() * l.outputs, 0.0);
            let (weights, biases) = l.params.split_at(l.inputs * l.outputs);
            for (x, y) in x.chunks_exact(l.inputs).zip(y.chunks_exact_mut(l.outputs)) {
                y.copy_from_slice(biases);
                for (x, w) in x.iter().zip(weights.chunks_exact(l.outputs)) {
                    // Dark pixels and silent neurons are many.
                    if *x != 0.0 {
                        add_scaled(y, *x, w);
                    }
                }
                if i + 1 < self.layers.len() {
                    y.iter_mut().for_each(|v| *v = v.max(0.0));
                }
            }
        }
    }

    /// Scores the outputs in `pass` and prepares the backward pass.
    pub(crate) fn score(&self, pass: &mut Pass) -> Score {
        let last = self.layers.len() - 1;
        let width = self.layers[last].outputs;
        let mut score = Score { rows: pass.labels.len(), ..Score::default() };
        let deltas = &mut pass.deltas[last];
        deltas.resize(pass.labels.len() * width, 0.0);
        let rows = pass.values[last + 1].chunks_exact(width).zip(deltas.chunks_exact_mut(width)).zip(&pass.labels);
        for ((y, delta), label) in rows {
            let label = usize::from(*label);
            let best = (0..width).max_by(|a, b| y[*a].total_cmp(&y[*b])).unwrap_or(0);
            // Shifted by the maximum, so that no exponential overflows.
            let mut sum = 0.0;
            for (d, v) in delta.iter_mut().zip(y) {
                *d = (v - y[best]).exp();
                sum += *d;
            }
            score.loss += f64::from(sum.ln() + y[best] - y[label]);
            score.correct += usize::from(best == label);
            delta.iter_mut().for_each(|d| *d /= sum);
            delta[label] -= 1.0;
        }
        score
    }

    /// The gradient of layer `i`'s parameters: that of the sum of the rows' losses, times `scale`.
    pub(crate) fn gradient(&self, pass: &Pass, i: usize, scale: f64, grad: &mut [f64]) {
        let l = &self.layers[i];
        grad.fill(0.0);
        let (weights, biases) = grad.split_at_mut(l.inputs * l.outputs);
        let rows = pass.values[i].chunks_exact(l.inputs).zip(pass.deltas[i].chunks_exact(l.outputs));
        for (x, delta) in rows {
            add_exactly(biases, 1.0, delta);
            for (x, w) in x.iter().zip(weights.chunks_exact_mut(l.outputs)) {
                if *x != 0.0 {
                    add_exactly(w, *x, delta);
                }
            }
        }
        grad.iter_mut().for_each(|g| *g *= scale);
    }

    /// Carries the derivatives from layer `i`, not the first, to the one before.
    pub(crate) fn propagate(&self, pass: &mut Pass, i: usize) {
        let l = &self.layers[i];
        let (before, after) = pass.deltas.split_at_mut(i);
        let (to, from) = (&mut before[i - 1], &after[0]);
        to.resize(pass.labels.len() * l.inputs, 0.0);
        let values = pass.values[i].chunks_exact(l.inputs);
        for ((to, from), x) in to.chunks_exact_mut(l.inputs).zip(from.chunks_exact(l.outputs)).zip(values) {
            for ((t, x), w) in to.iter_mut().zip(x).zip(l.params.chunks_exact(l.outputs)) {
                // Where the ReLU was silent nothing passes.
                *t = if *x > 0.0 { dot(w, from) } else { 0.0 };
            }
        }
    }
}

impl Pass {
    /// An empty pass for `net`.
    pub(crate) fn new(net: &Net) -> Self {
        let layers = net.layers.len();
        Self { labels: Vec::new(), values: vec![Vec::new(); layers + 1], deltas: vec![Vec::new(); layers] }
    }

    /// Takes these rows in place of those it had.
    pub(crate) fn load(&mut self, data: &Dataset, rows: &[usize]) {
        self.labels.clear();
        self.values[0].clear();
        for row in rows {
            self.labels.push(data.label(*row));
            self.values[0].extend_from_slice(data.image(*row));
        }
    }
}

/// Stochastic gradient descent with momentum. In f64 like the gradients: only the new parameter is rounded.
#[derive(Clone, Debug)]
pub(crate) struct Sgd {
    rate: f64,
    momentum: f64,
    velocity: Vec<Vec<f64>>,
}

impl Sgd {
    pub(crate) fn new(net: &Net, rate: f32, momentum: f32) -> Self {
        let velocity = net.layers.iter().map(|l| vec![0.0; l.params.len()]).collect();
        Self { rate: rate.into(), momentum: momentum.into(), velocity }
    }

    /// Moves the parameters of layer `i` against their gradient.
    pub(crate) fn update(&mut self, net: &mut Net, i: usize, grad: &[f64]) {
        for ((p, v), g) in net.layers[i].params.iter_mut().zip(&mut self.velocity[i]).zip(grad) {
            *v = self.momentum * *v + g;
            *p = (f64::from(*p) - self.rate * *v) as f32;
        }
    }
}

/// `y += a * x`
fn add_scaled(y: &mut [f32], a: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// `y += a * x`, with products and sums in f64
fn add_exactly(y: &mut [f64], a: f32, x: &[f32]) {
    let a = f64::from(a);
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * f64::from(*x);
    }
}

/// The scalar product, in eight sums side by side: one sum would make each addition wait for the last.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (ac, bc) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: f32 = ac.remainder().iter().zip(bc.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in ac.zip(bc) {
        for i in 0..8 {
            sums[i] += x[i] * y[i];
        }
    }
    sums.iter().sum::<f32>() + tail
}
