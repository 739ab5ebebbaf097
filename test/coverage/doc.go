// Package coverage holds test/coverage/rows.md to its word: a line for each row, and only names that exist.
package coverage
