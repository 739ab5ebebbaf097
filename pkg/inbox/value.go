package inbox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	engine "github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/codec"
)

// MaxResult is the largest encoded result of OnceValue, in bytes. A result is a part of the marker, and each repetition reads it.
const MaxResult = 1 << 20

// OnceValue is Inbox.Once for a function with a result: it runs fn if the key was not handled before, and stores the result with the
// marker, in the transaction of the effect. If the key was handled before, it returns the result of that call instead of
// ErrDuplicate, and repeated is true. The result is kept as long as the marker: see WithRetention.
//
// Other calls with the key wait, or return ErrInProgress, as those of Once. If fn fails, OnceValue returns its error and stores
// nothing, so the next call runs fn. Other errors:
//   - ErrMismatch: the key was handled with another fingerprint. See WithFingerprint.
//   - ErrNoResult: the key was handled by Once, which stores no result.
//   - ErrResultTooLarge: the encoded result is larger than MaxResult. Nothing was committed.
//   - The error of the codec, if it cannot encode the result, or decode the stored one as a T. In the first case nothing was committed.
//
// OnceValue needs one update more than Once, and a repetition one read more.
func OnceValue[T any](ctx context.Context, in *Inbox, key Key, fn func(ctx context.Context) (T, error), opts ...ValueOption) (value T, repeated bool, err error) {
	var none T
	if err := key.check(); err != nil {
		return none, false, err
	}
	set := valueSettings{codec: codec.JSON()}
	for _, o := range opts {
		if o != nil {
			o.applyToValue(&set)
		}
	}

	entry := key.entry()
	response, repeated, err := in.engine.OnceResponse(ctx, entry, func(ctx context.Context) (engine.Response, error) {
		var err error
		if value, err = fn(ctx); err != nil {
			return engine.Response{}, err
		}
		encoded, err := set.codec.Encode(value)
		if err != nil {
			return engine.Response{}, fmt.Errorf("encoding the result for %s: %w", key.describe(), err)
		}
		if len(encoded) > MaxResult {
			return engine.Response{}, fmt.Errorf("%w: %d bytes for %s, at most %d are allowed; store the data elsewhere and return a reference",
				ErrResultTooLarge, len(encoded), key.describe(), MaxResult)
		}
		return engine.Response{Fingerprint: set.fingerprint, Value: encoded}, nil
	}, set.once)

	switch {
	case errors.Is(err, engine.ErrNoResponse):
		return none, repeated, fmt.Errorf("%w: %s", ErrNoResult, key.describe())
	case err != nil:
		return none, repeated, translate(err, key, entry.Key)
	case !repeated:
		return value, false, nil
	case !bytes.Equal(response.Fingerprint, set.fingerprint):
		return none, true, fmt.Errorf("%w: %s", ErrMismatch, key.describe())
	}
	// A run of fn that was rolled back has left its value, and a decoder keeps the fields that the stored result does not have.
	var stored T
	if err := set.codec.Decode(ctx, response.Value, &stored); err != nil {
		return none, true, fmt.Errorf("decoding the stored result for %s: %w", key.describe(), err)
	}
	return stored, true, nil
}

// valueSettings are the settings of one call of OnceValue.
type valueSettings struct {
	once        engine.OnceConfig
	codec       codec.Codec
	fingerprint []byte // nil: none
}

// ValueOption is an option of OnceValue. Each OnceOption is one too.
type ValueOption interface{ applyToValue(s *valueSettings) }

type valueOption func(s *valueSettings)

func (o valueOption) applyToValue(settings *valueSettings) { o(settings) }

// WithCodec sets the codec of the result. All calls for a key must use codecs of one format. Defaults to codec.JSON.
func WithCodec(chosen codec.Codec) ValueOption {
	return valueOption(func(settings *valueSettings) {
		if chosen != nil {
			settings.codec = chosen
		}
	})
}

// WithFingerprint makes OnceValue return ErrMismatch if the key was handled with other parts, for example with another body of a
// request: the caller uses a key for two requests by mistake. Only a SHA-256 hash of the parts is stored. Defaults to none.
func WithFingerprint(parts ...[]byte) ValueOption {
	return valueOption(func(settings *valueSettings) {
		hash := sha256.New()
		for _, part := range parts {
			// The hash of each part has a fixed length, so parts cannot be divided in another way.
			digest := sha256.Sum256(part)
			hash.Write(digest[:])
		}
		settings.fingerprint = slices.Clip(hash.Sum(nil))
	})
}
