package saga

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
)

const (
	// maxStuckReason limits the stored error text of a held message, in bytes.
	maxStuckReason = 512
	// maxTransient is how many transient errors leave a held message out. Without a limit, a step that never fits
	// into the lifetime of a transaction would fail the messages before it forever.
	maxTransient = 10
)

// failures describes the runs of the step of a held message that have aborted their transactions.
type failures struct {
	transient int
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

// failedSteps contains the failures of held messages. A failure stays after the run that leaves the message out: the same
// transaction may run once more, for example because the step of another held message fails.
type failedSteps struct {
	mu           sync.Mutex
	newer, older map[heldKey]failures
}

const (
	// maxRuns is longer than the runs of one transaction take. Older failures belong to a transaction that has ended.
	maxRuns = 5 * time.Minute
	// maxFailedSteps limits the memory of one process to about 10 MB.
	maxFailedSteps = 8_000
)

// get returns the failures of a step.
func (f *failedSteps) get(key heldKey) failures {
	f.mu.Lock()
	defer f.mu.Unlock()
	found, ok := f.newer[key]
	if !ok {
		found = f.older[key]
	}
	if time.Since(found.at) > maxRuns {
		return failures{}
	}
	return found
}

// put stores the failures of a step.
func (f *failedSteps) put(key heldKey, failed failures) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.newer == nil || len(f.newer) >= maxFailedSteps {
		f.older, f.newer = f.newer, map[heldKey]failures{}
	}
	f.newer[key] = failed
}

// heldError is the failure of the step of a held message that has aborted the transaction of another message. Its label makes the
// transaction run again at once. Otherwise the failure would count as an attempt of the other message.
type heldError struct{ error }

func (e *heldError) Unwrap() error { return e.error }

// HasErrorLabel implements mongo.LabeledError.
func (e *heldError) HasErrorLabel(label string) bool { return label == labelTransient }

// labelTransient is the label of the driver for errors after which a transaction runs again.
const labelTransient = "TransientTransactionError"

// add returns f with one more error. A step that ctx has left no time for would need as long again.
func (f failures) add(ctx context.Context, err error) failures {
	// The stack of a panic does not fit.
	reason, _, _ := strings.Cut(err.Error(), "\ngoroutine ")
	f.permanent, f.reason, f.at = !isTransient(err) || ctx.Err() != nil, record.Clip(reason, maxStuckReason), time.Now()
	f.transient++
	return f
}

// decided reports whether the next attempt leaves the message out.
func (f failures) decided() bool { return f.permanent || f.transient >= maxTransient }

// isTransient reports whether the same transaction may succeed when it runs again.
func isTransient(err error) bool {
	labeled, ok := errors.AsType[mongo.LabeledError](err)
	return ok && labeled.HasErrorLabel(labelTransient) || mongodb.IsDriverTimeout(err) || mongodb.IsConnectionLost(err)
}
