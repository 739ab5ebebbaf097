// Package pages checks the pages of the documentation that are made from the code: docs/configuration.md from the schema of the
// configuration, and the tables of docs/metrics.md from the catalog of metrics. It needs no servers.
package pages
