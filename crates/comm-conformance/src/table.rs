//! What a backend is expected not to do, written down by hand.

use std::fmt;

use comm_core::{DType, Error, OpQuery, Operation, ReduceOp, Result};
use serde::Deserialize;

/// The expected support of one backend: everything but what is listed.
///
/// The text is TOML:
///
/// ```toml
/// backend = "mine"               # the registry name
///
/// [[unsupported]]                # any number of these
/// operations = ["scan", "exscan"]
/// dtypes = ["e4m3", "e5m2"]      # left out: all
/// operators = ["avg"]            # left out: all, and calls without operator
/// reason = "the library underneath has no such reduction"
/// ```
///
/// Operations, dtypes and operators have the names that [`Operation::name`], [`DType::name`] and [`ReduceOp::name`]
/// give them; `split` stands for the creation of children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    backend: String,
    rows: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    operations: Vec<Operation>,
    dtypes: Option<Vec<DType>>,
    operators: Option<Vec<ReduceOp>>,
    reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    backend: String,
    #[serde(default)]
    unsupported: Vec<TextRow>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TextRow {
    operations: Vec<String>,
    dtypes: Option<Vec<String>>,
    operators: Option<Vec<String>>,
    reason: String,
}

fn names<T>(what: &str, list: &[String], find: impl Fn(&str) -> Option<T>) -> Result<Vec<T>> {
    if list.is_empty() {
        return Err(Error::invalid(format!("support table: an empty list of {what}s means nothing; leave it out")));
    }
    let find = |n: &String| find(n).ok_or_else(|| Error::invalid(format!("support table: there is no {what} '{n}'")));
    list.iter().map(find).collect()
}

impl Table {
    /// The table of a backend that does everything.
    #[must_use]
    pub fn complete(backend: impl Into<String>) -> Self {
        Self { backend: backend.into(), rows: Vec::new() }
    }

    /// Reads a table.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for text that is not such a table, unknown names included.
    pub fn from_toml(text: &str) -> Result<Self> {
        let text: Text = toml::from_str(text).map_err(|e| Error::invalid(format!("support table: {e}")))?;
        let row = |r: TextRow| {
            let operation = |n: &str| Operation::ALL.iter().copied().find(|o| o.name() == n);
            let dtypes = r.dtypes.as_deref().map(|l| names("dtype", l, DType::from_name)).transpose()?;
            let operators = r.operators.as_deref().map(|l| names("operator", l, ReduceOp::from_name)).transpose()?;
            if r.reason.trim().is_empty() {
                return Err(Error::invalid("support table: a row without a reason"));
            }
            let operations = names("operation", &r.operations, operation)?;
            Ok(Row { operations, dtypes, operators, reason: r.reason })
        };
        let rows = text.unsupported.into_iter().map(row).collect::<Result<_>>()?;
        Ok(Self { backend: text.backend, rows })
    }

    /// The backend's name.
    #[must_use]
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// Why the backend is expected not to do this; `None` when it must.
    #[must_use]
    pub fn unsupported(&self, query: &OpQuery) -> Option<&str> {
        fn has<T: PartialEq>(list: &Option<Vec<T>>, x: Option<T>) -> bool {
            list.as_ref().is_none_or(|l| x.is_some_and(|x| l.contains(&x)))
        }
        let fits = |r: &&Row| {
            r.operations.contains(&query.operation) && has(&r.dtypes, query.dtype) && has(&r.operators, query.redop)
        };
        self.rows.iter().find(fits).map(|r| r.reason.as_str())
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "backend {}", self.backend)?;
        match self.rows.len() {
            0 => write!(f, ": everything is expected to work"),
            n => write!(f, ": {n} row(s) of what is not expected to work"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_narrow_by_dtype_and_operator() {
        let t = Table::from_toml(
            "backend = 'x'\n[[unsupported]]\noperations = ['scan']\ndtypes = ['f16']\noperators = ['avg']\nreason = 'r'\n\
             [[unsupported]]\noperations = ['barrier']\nreason = 'deaf'\n",
        )
        .unwrap();
        let q = OpQuery::new(Operation::Scan).dtype(DType::F16);
        assert_eq!(t.unsupported(&q.redop(ReduceOp::Avg)), Some("r"));
        assert_eq!(t.unsupported(&q.redop(ReduceOp::Sum)), None);
        assert_eq!(t.unsupported(&q.dtype(DType::F32).redop(ReduceOp::Avg)), None);
        assert_eq!(t.unsupported(&OpQuery::new(Operation::Barrier)), Some("deaf"));
    }

    #[test]
    fn mistakes_are_errors() {
        let bad =
            |rest: &str| Table::from_toml(&format!("backend = 'x'\n[[unsupported]]\n{rest}")).unwrap_err().to_string();
        assert!(bad("operations = ['scam']\nreason = 'r'").contains("no operation 'scam'"));
        assert!(bad("operations = ['scan']\ndtypes = ['f17']\nreason = 'r'").contains("no dtype 'f17'"));
        assert!(bad("operations = ['scan']\nreason = ''").contains("without a reason"));
        assert!(bad("operations = []\nreason = 'r'").contains("empty list"));
        assert!(bad("operation = ['scan']\nreason = 'r'").contains("support table"));
    }

    #[test]
    fn the_tables_of_this_workspace_can_be_read() {
        for (name, text) in
            [("tcp", include_str!("../expected/tcp.toml")), ("sim", include_str!("../expected/sim.toml"))]
        {
            assert_eq!(Table::from_toml(text).unwrap(), Table::complete(name));
        }
        assert!(!Table::from_toml(include_str!("../expected/example.toml")).unwrap().rows.is_empty());
    }
}
