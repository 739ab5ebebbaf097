// Package bodystore keeps large payloads outside of Kafka (the claim check pattern). The producer's
// middleware stores a body and sends a reference; the consumer's middleware loads the body before the
// handler runs.
//
// Both sides call the store once for each large body. A body is stored before the transaction of its
// event commits, so a committed event always has its body. The body of an aborted transaction stays
// until it is older than the time to live of the store.
package bodystore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// header is the record header with the reference to a stored body.
const header = "claim-check"

// Store keeps bodies that are too large for a record. *GridFS implements it. The methods are safe for
// concurrent use.
type Store interface {
	// Put stores a body and returns a reference to it. The reference contains no semicolon. After Put has returned, the
	// body must not be lost, even if a transaction of ctx aborts.
	Put(ctx context.Context, body []byte) (ref string, err error)
	// Get returns a body of size bytes. It returns ErrGone if the body does not exist. If the stored body is longer, Get may
	// return any part of it that is longer than size: the caller rejects it.
	Get(ctx context.Context, ref string, size int) ([]byte, error)
}

// ErrGone reports that a body does not exist in its store: it was removed, or never stored. A message
// without its body becomes a dead letter.
var ErrGone = errors.New("bodystore: the body is gone")

// maxBody is the largest body that Consume loads, in bytes.
const maxBody = 1 << 30

// defaultThreshold is the size from which GridFS costs less than a large record.
const defaultThreshold = 256 << 10

// Produce stores payloads above threshold bytes in store and puts a reference into the event. The record
// then has an empty value. A threshold of 0 is 256 KiB. Produce must be the innermost middleware, inside
// of bodycrypt.Encrypt.
func Produce(store Store, threshold int) outbox.Middleware {
	if threshold <= 0 {
		threshold = defaultThreshold
	}

	return func(next outbox.AppendFunc) outbox.AppendFunc {
		return func(ctx context.Context, ev event.Event) error {
			body, err := ev.Payload()
			if err != nil {
				return err
			}
			// A header of this name means that an outer call has stored the body.
			if _, ok := ev.Header(header); ok || len(body) <= threshold {
				return next(ctx, ev)
			}

			ref, err := store.Put(ctx, body)
			if err != nil {
				return fmt.Errorf("storing the body of event %s: %w", ev.ID(), err)
			}

			claim := newClaim(ref, body)
			return next(ctx, ev.With(event.WithPayload(event.Bytes(ev.ContentType(), nil)), event.WithHeader(header, []byte(claim))))
		}
	}
}

// newClaim returns the value of the header for a stored body: its reference, size and checksum.
func newClaim(ref string, body []byte) string {
	sum := sha256.Sum256(body)
	return fmt.Sprintf("%s;size=%d;sha256=%s", ref, len(body), hex.EncodeToString(sum[:]))
}

// parseClaim returns the parts of a claim.
func parseClaim(claim string) (ref string, size int, sum string, err error) {
	ref, rest, _ := strings.Cut(claim, ";size=")
	digits, sum, ok := strings.Cut(rest, ";sha256=")
	size, err = strconv.Atoi(digits)
	if !ok || err != nil || size < 0 || size > maxBody {
		return "", 0, "", fmt.Errorf("claim check: the header is invalid; expected REFERENCE;size=BYTES;sha256=CHECKSUM with at most %d bytes", maxBody)
	}
	return ref, size, sum, nil
}

// Consume loads the payloads that Produce stored: the handler gets a copy of the message with the whole
// payload. Consume must be the outermost middleware, outside of bodycrypt.Decrypt. Dead letters keep the
// reference. If a body is gone or was changed, the error is a consumer.ErrMalformed.
func Consume(store Store) consumer.Middleware {
	return func(next consumer.HandlerFunc) consumer.HandlerFunc {
		return func(ctx context.Context, message *consumer.Message) error {
			claim, ok := message.Header(header)
			if !ok {
				return next(ctx, message)
			}

			ref, size, want, err := parseClaim(string(claim))
			if err != nil {
				return fmt.Errorf("%w: message %s: %w", consumer.ErrMalformed, message.ID, err)
			}
			body, err := store.Get(ctx, ref, size)
			if errors.Is(err, ErrGone) {
				problem := "claim check: " + ErrGone.Error()
				return fmt.Errorf("%w: message %s: %s: %w", consumer.ErrMalformed, message.ID, problem, err)
			}
			if err != nil {
				return fmt.Errorf("reading the body of message %s: %w", message.ID, err)
			}
			// Someone who can write to the store could otherwise change events.
			if sum := sha256.Sum256(body); hex.EncodeToString(sum[:]) != want {
				problem := "claim check: the body differs from the stored checksum"
				return fmt.Errorf("%w: message %s: %s", consumer.ErrMalformed, message.ID, problem)
			}

			copied := *message
			copied.Value = body
			copied.DeleteHeader(header)
			return next(ctx, &copied)
		}
	}
}
