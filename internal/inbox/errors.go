package inbox

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Errors returned by this package. Test for them with errors.Is.
var (
	// ErrDuplicate means that the message was handled before. The error is a *DuplicateError.
	ErrDuplicate = errors.New("handled before")

	// ErrClaimed means that another holder has claimed the message. The error is a *ClaimedError.
	ErrClaimed = errors.New("claimed by another")

	// ErrClaimLost means that a claim is no longer held: its lease expired and another holder
	// claimed the message, or it was released. The error is a *ClaimLostError.
	ErrClaimLost = errors.New("claim lost")

	// ErrBusy means that this process is handling the same identity. The error is a *BusyError.
	ErrBusy = errors.New("being handled in this process")

	// ErrRecreated means that a watermark belongs to a deleted topic with the same name, or that
	// the topic lost records. The error is a *RecreatedError.
	ErrRecreated = errors.New("topic was recreated or lost records")

	// ErrUnconfirmed means that a topic seems to have been recreated or truncated. Read the end
	// offset and the leader epoch again, and call Attach with the new values.
	ErrUnconfirmed = errors.New("read the partition's end again and attach again")

	// ErrStale means that another process has begun a new generation of the partition. The error is
	// a *StaleError.
	ErrStale = errors.New("a newer generation of the partition has begun")

	// ErrInvalid means that an entry or an argument is invalid.
	ErrInvalid = errors.New("invalid argument")

	// ErrInTransaction means that Claim was called in a running transaction. A claim must stay if
	// that transaction rolls back. It wraps ErrInvalid.
	ErrInTransaction = fmt.Errorf("%w: a claim must be committed before the handler's transaction begins: call Claim outside of it", ErrInvalid)
)

// DuplicateError reports identities that were handled before. It wraps ErrDuplicate.
type DuplicateError struct {
	// Keys contains the identities.
	Keys []Key

	// Err is the error of the server, or nil if the duplicates were found by reading.
	Err error
}

func (e *DuplicateError) Error() string {
	const maxShown = 3
	texts := make([]string, 0, maxShown)
	for _, k := range e.Keys[:min(maxShown, len(e.Keys))] {
		texts = append(texts, k.String())
	}

	more := ""
	if n := len(e.Keys) - maxShown; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}

	return fmt.Sprintf("%s: %s%s", ErrDuplicate, strings.Join(texts, ", "), more)
}

// Unwrap returns ErrDuplicate and the error of the server.
func (e *DuplicateError) Unwrap() []error { return nonNilErrors(ErrDuplicate, e.Err) }

// ClaimedError reports a message that another holder has claimed. It wraps ErrClaimed.
type ClaimedError struct {
	// Key is the identity of the message.
	Key Key

	// Until is the end of the lease by the server's clock, unless the holder renews it.
	Until time.Time
}

func (e *ClaimedError) Error() string {
	return fmt.Sprintf("%s: %s until %s", ErrClaimed, e.Key, e.Until.UTC().Format(time.RFC3339Nano))
}

// Unwrap returns ErrClaimed.
func (e *ClaimedError) Unwrap() error { return ErrClaimed }

// ClaimLostError reports a claim that is no longer held. It wraps ErrClaimLost.
type ClaimLostError struct {
	// Key is the identity of the message.
	Key Key

	// Err is the error of the last renewal, or nil if the claim was taken over or released.
	Err error
}

func (e *ClaimLostError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s could not be renewed in time: %v", ErrClaimLost, e.Key, e.Err)
	}
	return fmt.Sprintf("%s: %s was taken over by another holder, or released", ErrClaimLost, e.Key)
}

// Unwrap returns ErrClaimLost and the cause.
func (e *ClaimLostError) Unwrap() []error { return nonNilErrors(ErrClaimLost, e.Err) }

// BusyError reports an identity that this process is handling. It wraps ErrBusy.
type BusyError struct{ Key Key }

func (e *BusyError) Error() string { return fmt.Sprintf("%s: %s", ErrBusy, e.Key) }

// Unwrap returns ErrBusy.
func (e *BusyError) Unwrap() error { return ErrBusy }

// RecreatedError reports a partition that does not match its watermark, because the topic was
// recreated or lost records. It wraps ErrRecreated.
type RecreatedError struct {
	// Consumer, Topic and Partition identify the partition.
	Consumer, Topic string
	Partition       int32

	// Watermark is the offset after the last record that was handled.
	Watermark int64

	// End is the current end offset of the partition.
	End int64

	// Epoch is the current leader epoch, and Seen the highest one that was seen before. −1 is
	// unknown.
	Epoch, Seen int32
}

func (e *RecreatedError) Error() string {
	return fmt.Sprintf("%s: partition %d of %s ends at offset %d with leader epoch %d, but %s has handled up to offset %d at epoch %d; "+
		"if the topic was deleted and created again, call Renew or use WithRecreated(Resume)",
		ErrRecreated, e.Partition, e.Topic, e.End, e.Epoch, e.Consumer, e.Watermark, e.Seen)
}

// Unwrap returns ErrRecreated.
func (e *RecreatedError) Unwrap() error { return ErrRecreated }

// StaleError reports that another process has begun a new generation of the partition. Records that
// this process has fetched may belong to a deleted topic: drop them and call Attach again. It wraps
// ErrStale.
type StaleError struct {
	// Consumer, Topic and Partition identify the partition.
	Consumer, Topic string
	Partition       int32

	// Attached is the generation of this process, and Current the new one.
	Attached, Current int64
}

func (e *StaleError) Error() string {
	return fmt.Sprintf("%s: %s is attached to generation %d of partition %d of %s, which is now at %d; "+
		"drop the fetched records and attach again",
		ErrStale, e.Consumer, e.Attached, e.Partition, e.Topic, e.Current)
}

// Unwrap returns ErrStale.
func (e *StaleError) Unwrap() error { return ErrStale }

// PrivilegeError reports an action for which the MongoDB user has no permission.
type PrivilegeError struct {
	// Action is the action, and On the database or collection.
	Action, On string

	// Err is the error of the server.
	Err error
}

func (e *PrivilegeError) Error() string {
	return fmt.Sprintf("the user has no permission to %s on %s: grant it, or let an administrator run the statements of Indexes: %v",
		e.Action, e.On, e.Err)
}

// Unwrap returns the error of the server.
func (e *PrivilegeError) Unwrap() error { return e.Err }

// nonNilErrors returns the errors that are not nil.
func nonNilErrors(errs ...error) []error {
	kept := errs[:0]
	for _, err := range errs {
		if err != nil {
			kept = append(kept, err)
		}
	}
	return kept
}
