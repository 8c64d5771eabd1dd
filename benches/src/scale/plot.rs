//! The results as a picture: modelled time against ranks, both in powers of ten, as SVG.

use std::fmt::Write as _;

use rustcomms::Operation;

use super::case::Row;
use super::report::{Report, size};

/// What is drawn: operation and bytes, three in a row.
const PANELS: [[(Operation, usize); 3]; 7] = {
    const SIZES: [usize; 3] = [8, 64 << 10, 16 << 20];
    const fn each(op: Operation) -> [(Operation, usize); 3] {
        [(op, SIZES[0]), (op, SIZES[1]), (op, SIZES[2])]
    }
    [
        each(Operation::AllReduce),
        each(Operation::Broadcast),
        each(Operation::Reduce),
        each(Operation::AllGather),
        each(Operation::ReduceScatter),
        each(Operation::AllToAll),
        [(Operation::Barrier, 0), (Operation::Gather, SIZES[1]), (Operation::Scan, SIZES[1])],
    ]
};

/// Algorithms by name, with colour and dashes; told apart by both. Dashed lines are thinner and come on top, so that one shows which lies on another.
const STYLES: [(&str, &str, &str); 10] = [
    ("direct", "#4477aa", ""),
    ("ordered", "#4477aa", "5 5"),
    ("recursive_doubling", "#ee6677", ""),
    ("halving", "#ee6677", "5 5"),
    ("rabenseifner", "#228833", ""),
    ("pairwise", "#228833", "5 5"),
    ("ring", "#aa3377", ""),
    ("chain", "#aa3377", "5 5"),
    ("binomial", "#d07a00", "5 5"),
    ("bruck", "#222222", "5 5"),
];
const DISSEMINATION: (&str, &str, &str) = ("dissemination", "#222222", "");

const WIDTH: f64 = 330.0;
const HEIGHT: f64 = 240.0;
/// Room for labels, left and below, and between panels.
const LEFT: f64 = 74.0;
const BELOW: f64 = 42.0;
const ABOVE: f64 = 26.0;
const GAP: f64 = 22.0;
const TOP: f64 = 82.0;

fn styles() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    STYLES.into_iter().chain([DISSEMINATION])
}

const fn stroke(dash: &str) -> f64 {
    if dash.is_empty() { 2.6 } else { 1.6 }
}

/// An axis in powers of ten.
#[derive(Clone, Copy, Debug)]
struct Axis {
    low: i32,
    high: i32,
    from: f64,
    to: f64,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<Self> {
        let (mut low, mut high) = (f64::INFINITY, 0.0f64);
        for v in values.filter(|v| *v > 0.0) {
            (low, high) = (low.min(v), high.max(v));
        }
        if high <= 0.0 {
            return None;
        }
        let low = low.log10().floor() as i32;
        Some(Self { low, high: (high.log10().ceil() as i32).max(low + 1), from, to })
    }

    fn at(&self, v: f64) -> f64 {
        let part = (v.log10() - f64::from(self.low)) / f64::from(self.high - self.low);
        (self.to - self.from).mul_add(part, self.from)
    }

    /// Every power of ten, or every second or third where there are many.
    fn ticks(&self) -> impl Iterator<Item = i32> {
        let step = ((self.high - self.low + 4) / 5).max(1);
        (self.low..=self.high).step_by(step as usize)
    }
}

fn power(e: i32) -> String {
    let (scale, unit) = match e {
        ..-6 => (-9, "ns"),
        -6..-3 => (-6, "µs"),
        -3..0 => (-3, "ms"),
        _ => (0, "s"),
    };
    format!("{} {unit}", 10i64.pow((e - scale).clamp(0, 18) as u32))
}

fn ranks(e: i32) -> String {
    match e {
        0..3 => 10i64.pow(e as u32).to_string(),
        _ => format!("{},000", 10i64.pow((e - 3).clamp(0, 15) as u32)),
    }
}

impl Report {
    /// The picture. Panels without rows are left empty, and say so.
    #[must_use]
    pub fn svg(&self) -> String {
        let (across, down) = (LEFT + WIDTH + GAP, ABOVE + HEIGHT + BELOW);
        let (w, h) = (3.0f64.mul_add(across, GAP), (PANELS.len() as f64).mul_add(down, TOP + GAP));
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w:.0}\" height=\"{h:.0}\" viewBox=\"0 0 {w:.0} {h:.0}\" \
             font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{GAP}\" y=\"22\" font-size=\"15\" font-weight=\"bold\">Modelled time of each algorithm against the number of ranks</text>\n\
             <text x=\"{GAP}\" y=\"40\">The library's schedules on a simulated clock with the model in scale.md; sizes: the whole buffer of all_reduce, broadcast, reduce \
             and scan, one block of the others. Both axes are logarithmic.</text>\n"
        );
        let mut x = GAP;
        for (name, colour, dash) in styles() {
            let width = stroke(dash);
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.0}\" y1=\"60\" x2=\"{:.0}\" y2=\"60\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-dasharray=\"{dash}\"/>\
                 <text x=\"{:.0}\" y=\"64\">{name}</text>",
                x + 26.0,
                x + 30.0
            );
            x += (name.len() as f64).mul_add(6.2, 46.0);
        }
        for (i, row) in PANELS.iter().enumerate() {
            for (j, (op, bytes)) in row.iter().enumerate() {
                let (x, y) = ((j as f64).mul_add(across, LEFT), (i as f64).mul_add(down, TOP + ABOVE));
                self.panel(&mut svg, *op, *bytes, (x, y));
            }
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn panel(&self, svg: &mut String, op: Operation, bytes: usize, (x, y): (f64, f64)) {
        let of = |r: &&Row| r.case.algorithm.operation() == op && r.case.bytes == bytes;
        let rows: Vec<&Row> = self.rows.iter().filter(of).collect();
        let title = if op == Operation::Barrier {
            op.name().to_owned()
        } else {
            format!("{}, {}", op.name(), size(bytes as u64))
        };
        let _ = writeln!(
            svg,
            "<text x=\"{x:.0}\" y=\"{:.0}\" font-size=\"12\" font-weight=\"bold\">{title}</text>\n\
             <rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"none\" stroke=\"#888888\"/>",
            y - 6.0
        );
        let xs = Axis::of(rows.iter().map(|r| r.case.n as f64), x, x + WIDTH);
        let ys = Axis::of(rows.iter().map(|r| r.seconds()), y + HEIGHT, y);
        let (Some(xs), Some(ys)) = (xs, ys) else {
            let _ = writeln!(svg, "<text x=\"{:.0}\" y=\"{:.0}\">not in this run</text>", x + 20.0, y + 30.0);
            return;
        };
        for e in xs.ticks() {
            let at = xs.at(10f64.powi(e));
            let _ = writeln!(
                svg,
                "<line x1=\"{at:.1}\" y1=\"{y:.0}\" x2=\"{at:.1}\" y2=\"{:.0}\" stroke=\"#dddddd\"/>\
                 <text x=\"{at:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>",
                y + HEIGHT,
                y + HEIGHT + 14.0,
                ranks(e)
            );
        }
        for e in ys.ticks() {
            let at = ys.at(10f64.powi(e));
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.0}\" y1=\"{at:.1}\" x2=\"{:.0}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\
                 <text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                x + WIDTH,
                x - 5.0,
                at + 4.0,
                power(e)
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">ranks</text>\n\
             <text transform=\"translate({:.0} {:.0}) rotate(-90)\" text-anchor=\"middle\">modelled time</text>",
            x + WIDTH / 2.0,
            y + HEIGHT + 28.0,
            x - 56.0,
            y + HEIGHT / 2.0
        );
        let dashed = |d: bool| styles().filter(move |s| s.2.is_empty() != d);
        for (name, colour, dash) in dashed(false).chain(dashed(true)) {
            let width = stroke(dash);
            let mut line: Vec<&&Row> = rows.iter().filter(|r| r.case.algorithm.name() == name).collect();
            line.sort_by_key(|r| r.case.n);
            if line.is_empty() {
                continue;
            }
            let points: Vec<_> =
                line.iter().map(|r| format!("{:.1},{:.1}", xs.at(r.case.n as f64), ys.at(r.seconds()))).collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-dasharray=\"{dash}\"/>",
                points.join(" ")
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::{Budget, Case, Model, Rates, algorithms};

    #[test]
    fn every_algorithm_has_a_style_of_its_own() {
        for a in algorithms() {
            assert_eq!(styles().filter(|s| s.0 == a.name()).count(), 1, "{a}");
        }
        let looks: std::collections::HashSet<_> = styles().map(|s| (s.1, s.2)).collect();
        assert_eq!(looks.len(), styles().count());
    }

    #[test]
    fn lines_stay_within_their_panels() {
        let model =
            Model::flat(6_000_000, 1_500_000, Rates { beta: 220_000_000, copy: 160_000_000, gamma: 90_000_000 });
        let mut rows = Vec::new();
        for a in algorithms().filter(|a| a.operation() == Operation::AllReduce) {
            rows.extend([2, 9, 100].map(|n| Case::new(a, n, 8).cost(model, Budget::QUICK).unwrap()));
        }
        let svg = Report { context: Vec::new(), model, measured: None, budget: Budget::QUICK, rows }.svg();
        let lines: Vec<&str> = svg.lines().filter(|l| l.starts_with("<polyline")).collect();
        assert_eq!(lines.len(), 4);
        for line in lines {
            let points = line.split('"').nth(1).unwrap();
            for p in points.split(' ') {
                let (x, y) = p.split_once(',').unwrap();
                let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                assert!((LEFT..=LEFT + WIDTH).contains(&x), "{p}");
                assert!((TOP + ABOVE..=TOP + ABOVE + HEIGHT).contains(&y), "{p}");
            }
        }
        assert_eq!(svg.matches("not in this run").count(), 20);
    }

    #[test]
    fn ticks_are_readable() {
        assert_eq!(
            [-7, -6, -5, -3, -1, 0, 2].map(power),
            ["100 ns", "1 µs", "10 µs", "1 ms", "100 ms", "1 s", "100 s"]
        );
        assert_eq!([0, 3, 4, 5].map(ranks), ["1", "1,000", "10,000", "100,000"]);
    }
}
