// Package transport declares how a consumer joins a group, reads its partitions and publishes records.
package transport
