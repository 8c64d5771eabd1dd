//! What the acceptance commands have to answer: all figures in one place, and pure checks over the JSON they write.

use serde_json::Value;

/// The training example must classify at least this share of the test digits.
pub(crate) const MIN_TEST_ACCURACY: f64 = 0.95;
/// Ranks that averaged the same gradients may differ by this much in any parameter from one process on all data.
pub(crate) const MAX_PARAM_DIFF: f64 = 1e-4;
/// Ranks of the training example.
pub(crate) const TRAIN_RANKS: usize = 4;
/// Operations that perf checks.
pub(crate) const OPS: [&str; 17] = [
    "sendrecv",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_v",
    "gather",
    "gather_v",
    "scatter",
    "scatter_v",
    "reduce_scatter",
    "reduce_scatter_v",
    "all_to_all",
    "all_to_all_v",
    "scan",
    "exscan",
    "barrier",
];
/// World sizes of the operations that everybody uses: powers of two, odd ones, and more than most runners have cores.
const WORLDS: [usize; 5] = [2, 3, 4, 5, 8];
/// World sizes of the others.
const FEW_WORLDS: [usize; 3] = [2, 3, 5];

/// The world sizes that an operation is checked on.
pub(crate) fn worlds(op: &str) -> &'static [usize] {
    let common = ["sendrecv", "broadcast", "all_reduce", "reduce", "all_gather", "reduce_scatter", "barrier"];
    if common.contains(&op) { &WORLDS } else { &FEW_WORLDS }
}

/// 8 bytes to 64 KiB in steps of eight, 3 iterations after 1 for warming up.
pub(crate) const PERF_ARGS: [&str; 10] = ["-b", "8", "-e", "64K", "-f", "8", "-n", "3", "-w", "1"];
/// How many sizes that is.
const SIZES: usize = 5;

/// Checks the training example's report; the answer is a line for the log.
pub(crate) fn training(json: &str) -> Result<String, String> {
    let report = parse(json)?;
    let accuracy = number(&report, "test_accuracy")?;
    let diff = number(&report, "max_param_diff")?;
    if accuracy < MIN_TEST_ACCURACY {
        return Err(format!("test_accuracy is {accuracy}, expected at least {MIN_TEST_ACCURACY}"));
    }
    if diff > MAX_PARAM_DIFF {
        return Err(format!("max_param_diff is {diff}, expected at most {MAX_PARAM_DIFF}"));
    }
    Ok(format!("test_accuracy {accuracy}, max_param_diff {diff}"))
}

/// Checks a report of `rustcomms perf OP --ranks WORLD`; the answer is a line for the log.
pub(crate) fn perf(op: &str, world: usize, json: &str) -> Result<String, String> {
    let report = parse(json)?;
    let rows = report.as_array().ok_or("the report is not an array")?;
    let wanted = if op == "barrier" { 1 } else { SIZES };
    if rows.len() < wanted {
        return Err(format!("the report has {} row(s), expected at least {wanted}", rows.len()));
    }
    let mut forms = 0;
    for row in rows {
        forms += perf_row(op, world, row).map_err(|e| format!("{e}, in the row {row}"))?;
    }
    Ok(format!("{} row(s), {forms} measurement(s), none wrong", rows.len()))
}

/// Checks one size; answers how many forms of the operation it holds.
fn perf_row(op: &str, world: usize, row: &Value) -> Result<usize, String> {
    if row["op"] != op {
        return Err(format!("op is {}, expected \"{op}\"", row["op"]));
    }
    if row["world"] != world {
        return Err(format!("world is {}, expected {world}", row["world"]));
    }
    let mut forms = 0;
    for form in ["out_of_place", "in_place"] {
        let Some(measured) = row.get(form) else { return Err(format!("{form} is missing")) };
        if measured.is_null() {
            continue; // the operation does not exist in this form
        }
        forms += 1;
        number(measured, "time_us").map_err(|e| format!("{form}: {e}"))?;
        match measured.get("wrong") {
            Some(Value::Null) if op == "barrier" => {} // moves nothing that could be wrong
            Some(Value::Null) => return Err(format!("{form}: wrong is null: the results were not checked")),
            Some(w) if w.as_f64() == Some(0.0) => {}
            Some(w) => return Err(format!("{form}: wrong is {w}, expected 0")),
            None => return Err(format!("{form}: wrong is missing")),
        }
    }
    if forms == 0 { Err("neither form was measured".to_owned()) } else { Ok(forms) }
}

fn parse(json: &str) -> Result<Value, String> {
    serde_json::from_str(json).map_err(|e| format!("the report is not JSON: {e}"))
}

fn number(report: &Value, key: &str) -> Result<f64, String> {
    report[key].as_f64().ok_or_else(|| format!("{key} is {}, expected a number", report[key]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn training_figures() {
        assert!(training(r#"{"test_accuracy": 0.95, "max_param_diff": 1e-4, "ranks": 4}"#).is_ok());
        let low = training(r#"{"test_accuracy": 0.9499, "max_param_diff": 0}"#).unwrap_err();
        assert!(low.contains("0.9499") && low.contains("0.95"), "{low}");
        assert!(
            training(r#"{"test_accuracy": 0.99, "max_param_diff": 1.1e-4}"#).unwrap_err().contains("max_param_diff")
        );
        assert!(training(r#"{"test_accuracy": 0.99}"#).unwrap_err().contains("max_param_diff is null"));
        assert!(training(r#"{"test_accuracy": 0.99, "max_param_diff": null}"#).is_err());
        assert!(training("").unwrap_err().contains("not JSON"));
    }

    #[test]
    fn every_operation_has_odd_and_even_worlds() {
        for op in OPS {
            assert!(worlds(op).starts_with(&[2, 3]) && worlds(op).contains(&5), "{op}");
        }
        assert_eq!((worlds("all_reduce").last(), worlds("exscan").len()), (Some(&8), 3));
    }

    fn form(wrong: Value) -> Value {
        json!({"time_us": 12.5, "min_us": 10.0, "p99_us": 20.0, "algbw": 0.1, "busbw": 0.1, "wrong": wrong})
    }

    fn report(op: &str, edit: impl Fn(&mut Value)) -> String {
        let row = |bytes: usize| {
            json!({"op": op, "backend": "tcp", "transport": "sockets", "world": 3, "bytes": bytes, "count": bytes / 4,
                "dtype": "f32", "redop": "sum", "root": 0, "out_of_place": form(json!(0)), "in_place": form(json!(0))})
        };
        let mut rows: Vec<Value> = [8, 64, 512, 4096, 32768].map(row).into();
        edit(rows.last_mut().unwrap());
        Value::Array(rows).to_string()
    }

    #[test]
    fn perf_reports_that_pass() {
        let line = perf("all_reduce", 3, &report("all_reduce", |_| {})).unwrap();
        assert_eq!(line, "5 row(s), 10 measurement(s), none wrong");
        assert!(perf("sendrecv", 3, &report("sendrecv", |r| r["in_place"] = Value::Null)).is_ok());
        assert!(perf("broadcast", 3, &report("broadcast", |r| r["out_of_place"] = Value::Null)).is_ok());
        let barrier = json!([{"op": "barrier", "world": 3, "out_of_place": form(Value::Null), "in_place": null}]);
        assert!(perf("barrier", 3, &barrier.to_string()).is_ok());
    }

    #[test]
    fn perf_reports_that_do_not() {
        let fails = |edit: &dyn Fn(&mut Value), part: &str| {
            let e = perf("reduce", 3, &report("reduce", edit)).unwrap_err();
            assert!(e.contains(part), "{e}");
        };
        fails(&|r| r["out_of_place"]["wrong"] = json!(2), "out_of_place: wrong is 2");
        fails(&|r| r["in_place"]["wrong"] = json!(1), "in_place: wrong is 1");
        fails(&|r| r["in_place"]["wrong"] = Value::Null, "not checked");
        fails(&|r| r["in_place"] = json!({"time_us": 1.0}), "in_place: wrong is missing");
        fails(&|r| r["in_place"]["time_us"] = json!("fast"), "time_us");
        fails(&|r| r["world"] = json!(4), "world is 4");
        fails(&|r| r["op"] = json!("all_reduce"), "op is \"all_reduce\"");
        fails(&|r| (r["in_place"], r["out_of_place"]) = (Value::Null, Value::Null), "neither form");
        fails(&|r| *r = json!({"op": "reduce", "world": 3}), "out_of_place is missing");
        let e = perf("reduce", 3, "[]").unwrap_err();
        assert!(e.contains("0 row(s)"), "{e}");
        assert!(perf("reduce", 3, "{}").unwrap_err().contains("not an array"));
        let wrong = json!([{"op": "barrier", "world": 3, "out_of_place": form(json!(1)), "in_place": null}]);
        assert!(perf("barrier", 3, &wrong.to_string()).is_err());
    }
}
