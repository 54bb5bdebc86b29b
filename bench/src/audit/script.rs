//! Literals of JavaScript: what report pages keep their data in.

use serde_json::{Map, Number, Value};

/// Deeper than any report nests its groups; a hostile file ends here and not with the stack.
const DEPTH_MAX: usize = 64;

/// Reads the literal that `text` begins with (after white space): an object, with or without quotes around its keys, an array,
/// a string in either quotes, a number, `true`, `false` or `null`. What follows it is left alone.
///
/// # Errors
/// The byte at which it stops being one.
pub(super) fn literal(text: &str) -> Result<Value, usize> {
    let mut reader = Reader { text, at: 0 };
    reader.value(0).ok_or(reader.at)
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn take(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn space(&mut self) {
        while self.peek().is_some_and(char::is_whitespace) {
            self.take();
        }
    }

    /// Takes it if it is what comes next after white space.
    fn is_next(&mut self, wanted: char) -> bool {
        self.space();
        let found = self.peek() == Some(wanted);
        if found {
            self.take();
        }
        found
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        self.space();
        match self.peek()? {
            '{' => self.object(depth),
            '[' => self.array(depth),
            '"' | '\'' => self.string().map(Value::String),
            _ => self.word(),
        }
    }

    fn object(&mut self, depth: usize) -> Option<Value> {
        self.take();
        let mut object = Map::new();
        while !self.is_next('}') {
            let key = match self.peek()? {
                '"' | '\'' => self.string()?,
                _ => self.bare()?.to_owned(),
            };
            if !self.is_next(':') {
                return None;
            }
            object.insert(key, self.value(depth + 1)?);
            if !self.is_next(',') && self.peek() != Some('}') {
                return None;
            }
        }
        Some(Value::Object(object))
    }

    fn array(&mut self, depth: usize) -> Option<Value> {
        self.take();
        let mut array = Vec::new();
        while !self.is_next(']') {
            array.push(self.value(depth + 1)?);
            if !self.is_next(',') && self.peek() != Some(']') {
                return None;
            }
        }
        Some(Value::Array(array))
    }

    fn string(&mut self) -> Option<String> {
        let quote = self.take()?;
        let mut string = String::new();
        loop {
            match self.take()? {
                each if each == quote => return Some(string),
                '\\' => match self.take()? {
                    'n' => string.push('\n'),
                    't' => string.push('\t'),
                    'u' => {
                        let digits = self.text.get(self.at..self.at + 4)?;
                        self.at += 4;
                        let code = u32::from_str_radix(digits, 16).ok()?;
                        string.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                    }
                    other => string.push(other),
                },
                each => string.push(each),
            }
        }
    }

    fn bare(&mut self) -> Option<&str> {
        let rest = &self.text[self.at..];
        let end = rest
            .find(|each: char| !(each.is_alphanumeric() || matches!(each, '_' | '$' | '.' | '-' | '+')))
            .unwrap_or(rest.len());
        if end == 0 {
            return None;
        }
        self.at += end;
        Some(&rest[..end])
    }

    fn word(&mut self) -> Option<Value> {
        let begin = self.at;
        let value = match self.bare()? {
            "true" => Some(Value::Bool(true)),
            "false" => Some(Value::Bool(false)),
            "null" => Some(Value::Null),
            word => word
                .parse::<f64>()
                .ok()
                .and_then(Number::from_f64)
                .map(Value::Number),
        };
        if value.is_none() {
            self.at = begin;
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_need_no_quotes_and_what_follows_is_left_alone() {
        let text = "{ type: 'GROUP', \"n\": {a: [1, 2.5, null,], }, path: \"a \\\"b\\\" \\u00b5\" }\nfunction f() {}";
        assert_eq!(
            literal(text),
            Ok(json!({"type": "GROUP", "n": {"a": [1.0, 2.5, null]}, "path": "a \"b\" µ"}))
        );
    }

    #[test]
    fn what_is_no_literal_says_where() {
        assert_eq!(literal("[1, stats.x]"), Err(4));
        assert_eq!(literal("{a: 1"), Err(5));
        assert_eq!(literal("'open"), Err(5));
        assert!(literal(&"[".repeat(1_000)).is_err());
    }
}
