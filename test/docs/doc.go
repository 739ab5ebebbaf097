// Package docs checks the documentation. docs/configuration.md is generated from the schema of the
// configuration, and the commands of the console blocks that follow a line `<!-- run -->` are executed
// next to `outrelay dev`. The links are checked by test/coverage, and the names of commands and flags in
// all other console blocks by cmd/outrelay.
package docs
