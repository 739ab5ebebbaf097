// Package coverage holds docs/coverage.md to its word: a line for each row, and only names that exist.
package coverage
