package saga

import (
	"errors"
	"maps"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

const (
	// maxStuckReason limits the stored error text of a held message, in bytes.
	maxStuckReason = 512
	// maxTransient is how many transient errors in a row leave a held message out. Without a limit, a step that never fits
	// into the lifetime of a transaction would fail the messages before it forever.
	maxTransient = 10
)

// failures describes the runs of the step of a held message that have aborted their transactions.
type failures struct {
	transient int    // in a row
	permanent bool   // the last error was not transient
	reason    string // of the last one
	at        time.Time
}

// heldKey is a held message, and the message whose transaction runs its step. With another message the step is tried again.
type heldKey struct {
	saga            string
	number          int64
	source, arrived string
}

// failedSteps contains the failures of held messages between two runs of a transaction.
type failedSteps struct {
	mu    sync.Mutex
	steps map[heldKey]failures
}

// maxRuns is longer than the runs of one transaction take. Older failures belong to a transaction that has ended, for example because
// its partition was given back.
const maxRuns = 5 * time.Minute

// take returns the failures of a step and forgets them.
func (f *failedSteps) take(key heldKey) failures {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dropOldLocked()
	found := f.steps[key]
	delete(f.steps, key)
	return found
}

// put stores the failures of a step until the next run.
func (f *failedSteps) put(key heldKey, failed failures) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.steps == nil {
		f.steps = map[heldKey]failures{}
	}
	f.steps[key] = failed
}

func (f *failedSteps) dropOldLocked() {
	maps.DeleteFunc(f.steps, func(_ heldKey, failed failures) bool { return time.Since(failed.at) > maxRuns })
}

// heldError is the failure of the step of a held message that has aborted the transaction of another message. Its label makes the
// transaction run again at once. Otherwise the failure would count as an attempt of the other message.
type heldError struct{ error }

func (e *heldError) Unwrap() error { return e.error }

// HasErrorLabel implements mongo.LabeledError.
func (e *heldError) HasErrorLabel(label string) bool { return label == labelTransient }

// labelTransient is the label of the driver for errors after which a transaction runs again.
const labelTransient = "TransientTransactionError"

// add returns f with one more error of the server.
func (f failures) add(err error, reason string) failures {
	f.permanent, f.reason, f.at = !isTransient(err), reason, time.Now()
	f.transient++
	return f
}

// decided reports whether the next attempt leaves the message out.
func (f failures) decided() bool { return f.permanent || f.transient >= maxTransient }

// isServerError reports whether err comes from a MongoDB server, or from the connection to it. Such an error aborts its
// transaction.
func isServerError(err error) bool {
	_, labeled := errors.AsType[mongo.LabeledError](err)
	_, server := errors.AsType[mongo.ServerError](err)
	return labeled || server || isTransient(err)
}

// isTransient reports whether the same transaction may succeed when it runs again.
func isTransient(err error) bool {
	labeled, ok := errors.AsType[mongo.LabeledError](err)
	return ok && labeled.HasErrorLabel(labelTransient) || mongodb.IsDriverTimeout(err) || mongodb.IsConnectionLost(err)
}
