// Package changes is the vocabulary of change streams: which collections a watcher reads (Scope), where a stream begins (Start), what it
// delivers (Batch, Event), and how it ends (GapError, InvalidateError). Package changestream reads the stream.
//
// Scopes are immutable, and Parse allocates nothing. Only ReadOplog and Scope.Watch call the server: each blocks until it
// responds or ctx ends.
package changes
