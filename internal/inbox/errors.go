package inbox

import (
	"errors"
	"fmt"
	"time"
)

// Errors returned by this package. Test for them with errors.Is.
var (
	// ErrDuplicate means that the message was handled before. The error is a *DuplicateError.
	ErrDuplicate = errors.New("handled before")

	// ErrInProgress means that another call is handling the message. The error is an
	// *InProgressError.
	ErrInProgress = errors.New("being handled by another call")

	// ErrClaimLost means that a claim is no longer held: its lease expired and another holder
	// claimed the message, or it was released. The error is a *ClaimLostError.
	ErrClaimLost = errors.New("claim lost")

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

// DuplicateError reports a message that was handled before. It wraps ErrDuplicate.
type DuplicateError struct{ Key Key }

func (e *DuplicateError) Error() string { return fmt.Sprintf("%s: %s", ErrDuplicate, e.Key) }

// Unwrap returns ErrDuplicate.
func (e *DuplicateError) Unwrap() error { return ErrDuplicate }

// InProgressError reports a message that another call is handling. It wraps ErrInProgress.
type InProgressError struct {
	// Key is the identity of the message.
	Key Key

	// Until is the end of the other call's lease by the server's clock, unless the holder renews it.
	// It is zero if the other call belongs to this process.
	Until time.Time
}

func (e *InProgressError) Error() string {
	if e.Until.IsZero() {
		return fmt.Sprintf("%s: %s", ErrInProgress, e.Key)
	}
	return fmt.Sprintf("%s: %s until %s", ErrInProgress, e.Key, e.Until.UTC().Format(time.RFC3339Nano))
}

// Unwrap returns ErrInProgress.
func (e *InProgressError) Unwrap() error { return ErrInProgress }

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
func (e *ClaimLostError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrClaimLost}
	}
	return []error{ErrClaimLost, e.Err}
}

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
		"if the topic was deleted and created again, run once without consumer.WithHaltOnRecreated",
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
