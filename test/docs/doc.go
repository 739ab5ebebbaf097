// Package docs checks the documentation. Each console block is executed against a relay with real servers, unless a line
// `<!-- not run: REASON -->` precedes it. The links are checked by test/coverage, and the names of commands and flags in
// all other console blocks by cmd/outrelay.
package docs
