// Package store holds the agreement on the number of slots of a watcher.
package store
