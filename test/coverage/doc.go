// Package coverage checks test/coverage/rows.md: each requirement has one line, and all tests and links
// that it names exist.
package coverage
