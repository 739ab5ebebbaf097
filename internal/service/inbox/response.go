package inbox

import (
	"context"
	"errors"
	"fmt"
)

// Response is the result of a message, which is stored with its marker, for as long as the marker.
type Response struct {
	Fingerprint []byte `bson:"f,omitempty"` // of the request; nil if it has none
	Value       []byte `bson:"v"`
}

// ErrNoResponse means that the message was handled before by a call that has stored no response.
var ErrNoResponse = errors.New("handled before by a call that stored no result")

// OnceResponse is Once for a function with a response, which is stored in the transaction of the effects. If the identity was handled
// before, it returns the stored response, and repeated is true. If that call has stored none, the error is ErrNoResponse.
//
// If fn runs more than once, its last response counts.
func (x *Inbox) OnceResponse(
	ctx context.Context, entry Entry, fn func(ctx context.Context) (Response, error), cfg OnceConfig,
) (response Response, repeated bool, err error) {
	// A message of Once has no place, so its marker belongs to no generation.
	id := entry.markerID(0)
	err = x.Once(ctx, entry, func(ctx context.Context) error {
		var err error
		if response, err = fn(ctx); err != nil {
			return err
		}
		return x.store.WriteResponse(ctx, id, response)
	}, cfg)

	duplicate, ok := errors.AsType[*DuplicateError](err)
	// An error of fn may be about another key.
	if !ok || duplicate.Key != entry.Key {
		return response, false, err
	}
	stored, err := x.store.ReadResponse(ctx, id)
	if err != nil {
		return Response{}, true, err
	}
	if stored == nil {
		return Response{}, true, fmt.Errorf("%w: %s", ErrNoResponse, entry.Key)
	}
	return *stored, true, nil
}
