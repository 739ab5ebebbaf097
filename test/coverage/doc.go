// Package coverage checks docs/coverage.md: each requirement has one line, and all tests and links that it names exist.
package coverage
