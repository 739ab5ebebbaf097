// Package bodycrypt encrypts payloads with AES-GCM between the service that appends an event and the
// handler. The outbox, Kafka and dead letters hold only the encrypted payload.
//
// Encryption and decryption are in memory. They block only if the key provider does.
package bodycrypt

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Headers of an encrypted record.
const (
	headerEncryption = "encryption"
	headerType       = "encryption-type"
)

// Key is an AES key with its id.
type Key struct {
	ID    string // 1 to 255 bytes, without a semicolon
	Bytes []byte // 16, 24 or 32 bytes: AES-128, -192 or -256
}

// Keys provides the keys. The methods are called for each message, so a provider that calls a key
// service must cache the keys. They are safe for concurrent use.
type Keys interface {
	// Current returns the key to encrypt with.
	Current(ctx context.Context) (Key, error)
	// Key returns the key of an id that is or was current. It returns ErrUnknownKey if there is no such key.
	Key(ctx context.Context, id string) (Key, error)
}

// ErrUnknownKey reports that a key provider has no key with the id. A message with such an id becomes a
// dead letter. Other errors of a provider are worth another attempt.
var ErrUnknownKey = errors.New("bodycrypt: unknown key")

// Static returns Keys with a fixed set of keys. To rotate a key, first add the new key as an old one in
// every process, then make it the current key. Remove the old key when no message that was encrypted with
// it can arrive any more. The error lists every problem.
func Static(current Key, old ...Key) (Keys, error) {
	keys := staticKeys{current: current.ID, keys: map[string]Key{}}
	var problems []error
	for _, k := range append([]Key{current}, old...) {
		if k.ID == "" || strings.Contains(k.ID, ";") || len(k.ID) > 255 {
			problems = append(problems, fmt.Errorf("bodycrypt: invalid key id %.64q: use 1 to 255 bytes without a semicolon", k.ID))
		}
		if _, err := aes.NewCipher(k.Bytes); err != nil {
			problems = append(problems, fmt.Errorf("bodycrypt: key %.64q has %d bytes: use 16, 24 or 32", k.ID, len(k.Bytes)))
		}
		if _, ok := keys.keys[k.ID]; ok {
			problems = append(problems, fmt.Errorf("bodycrypt: two keys have the id %.64q", k.ID))
		}
		keys.keys[k.ID] = Key{ID: k.ID, Bytes: bytes.Clone(k.Bytes)}
	}

	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	return keys, nil
}

type staticKeys struct {
	current string
	keys    map[string]Key
}

func (s staticKeys) Current(context.Context) (Key, error) { return s.keys[s.current], nil }

func (s staticKeys) Key(_ context.Context, id string) (Key, error) {
	if key, ok := s.keys[id]; ok {
		return key, nil
	}
	return Key{}, fmt.Errorf("%w %.64q", ErrUnknownKey, id)
}

// cryptVersion is the beginning of the encryption header. The header contains the version, the algorithm, the id of the key,
// and the names of the authenticated headers, separated by semicolons.
const cryptVersion = "1;aes-gcm"

// Encrypt encrypts the payloads of events with AES-GCM before they are stored. The outbox, Kafka, retry topics and dead
// letters then hold the encrypted body, and only a handler inside of Decrypt gets the plain body. The encryption also
// authenticates the event's id, its type, and the given headers, so that none of them can be exchanged. The key of a record,
// its headers and its type stay readable. Tombstones have no body and pass unchanged.
//
// The body grows by 28 bytes. Each event gets a random nonce. Use a key for at most 2³² events.
func Encrypt(keys Keys, headers ...string) outbox.Middleware {
	return func(next outbox.AppendFunc) outbox.AppendFunc {
		return func(ctx context.Context, ev event.Event) error {
			body, err := ev.Payload()
			if err != nil {
				return err
			}
			if _, ok := ev.Header(headerEncryption); ok || body == nil {
				return next(ctx, ev)
			}

			key, err := keys.Current(ctx)
			if err != nil {
				return fmt.Errorf("encrypting event %s: %w", ev.ID(), err)
			}
			aead, err := newGCM(key.Bytes)
			if err != nil {
				return fmt.Errorf("encrypting event %s: %w", ev.ID(), err)
			}

			// The head is authenticated too, so a changed key id or list of headers makes the decryption fail.
			head := strings.Join(append([]string{cryptVersion, key.ID}, headers...), ";")
			aad := authenticatedData(head, ev.ID().String(), ev.Name(), headers, ev.Header)

			nonce := make([]byte, aead.NonceSize(), aead.NonceSize()+len(body)+aead.Overhead())
			if _, err := rand.Read(nonce); err != nil {
				return fmt.Errorf("encrypting event %s: %w", ev.ID(), err)
			}

			return next(ctx, ev.With(
				event.WithPayload(event.Bytes(ev.ContentType(), aead.Seal(nonce, nonce, body, aad))),
				event.WithHeader(headerEncryption, []byte(head)),
				event.WithHeader(headerType, []byte(ev.Name())),
			))
		}
	}
}

// Decrypt decrypts the bodies that Encrypt has encrypted, and passes a copy of the message to the next handler. If the
// message was changed, or was not encrypted at all, the error is a consumer.ErrMalformed and the handler does not run. WithPlain
// accepts messages without encryption.
func Decrypt(keys Keys, opts ...Option) consumer.Middleware {
	var settings settings
	for _, o := range opts {
		if o != nil {
			o.apply(&settings)
		}
	}

	return func(next consumer.HandlerFunc) consumer.HandlerFunc {
		return func(ctx context.Context, message *consumer.Message) error {
			head, ok := message.Header(headerEncryption)
			if !ok {
				// A tombstone has no body to encrypt.
				if settings.plain || message.Tombstone() {
					return next(ctx, message)
				}
				return newDecryptError(message, errors.New("the message is not encrypted"))
			}

			body, err := decryptBody(ctx, keys, string(head), message)
			if err != nil {
				return err
			}

			// The next attempts, and a retry topic, need the message as it arrived.
			copied := *message
			copied.Value = body
			copied.DeleteHeader(headerEncryption)
			copied.DeleteHeader(headerType)
			return next(ctx, &copied)
		}
	}
}

// Option configures Decrypt.
type Option interface{ apply(*settings) }

type settings struct{ plain bool }

type optionFunc func(*settings)

func (f optionFunc) apply(settings *settings) { f(settings) }

// WithPlain accepts messages without encryption. Use it while a topic has both kinds. By default, such a
// message becomes a dead letter.
func WithPlain() Option { return optionFunc(func(settings *settings) { settings.plain = true }) }

// decryptBody returns the plain body of message. Errors of the key provider are worth another attempt. All other errors are an
// consumer.ErrMalformed.
func decryptBody(ctx context.Context, keys Keys, head string, message *consumer.Message) ([]byte, error) {
	parts := strings.Split(head, ";")
	if len(parts) < 3 || strings.Join(parts[:2], ";") != cryptVersion {
		return nil, newDecryptError(message, errors.New("unknown kind of encryption"))
	}

	key, err := keys.Key(ctx, parts[2])
	if errors.Is(err, ErrUnknownKey) {
		return nil, newDecryptError(message, err)
	}
	if err != nil {
		return nil, fmt.Errorf("decrypting message %s: %w", message.ID, err)
	}
	aead, err := newGCM(key.Bytes)
	if err != nil {
		return nil, fmt.Errorf("decrypting message %s: %w", message.ID, err)
	}

	typ, _ := message.Header(headerType)
	// The type selects the handler, so it must be the type that was encrypted.
	if message.Name != "" && message.Name != string(typ) {
		return nil, newDecryptError(message, errors.New("the message was encrypted with another type"))
	}

	n := aead.NonceSize()
	if len(message.Value) < n {
		return nil, newDecryptError(message, errors.New("the body is too short"))
	}
	aad := authenticatedData(head, message.ID, string(typ), parts[3:], message.Header)
	body, err := aead.Open([]byte{}, message.Value[:n], message.Value[n:], aad)
	if err != nil {
		return nil, newDecryptError(message, errors.New("the body or a header was changed, or the key is a different one"))
	}
	return body, nil
}

func newDecryptError(message *consumer.Message, err error) error {
	return fmt.Errorf("%w: message %s: decryption: %w", consumer.ErrMalformed, message.ID, err)
}

func newGCM(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// authenticatedData returns the additional data that is bound to the body. The length precedes each part, so that two
// different lists never have the same bytes.
func authenticatedData(
	head, id, typ string, headers []string, findHeader func(string) ([]byte, bool),
) []byte {
	var joined []byte
	appendPart := func(part []byte) { joined = append(binary.AppendUvarint(joined, uint64(len(part))), part...) }
	appendPart([]byte(head))
	// A record of the preset debezium has the base64 of a UUID.
	appendPart([]byte(event.ParseID(id).String()))
	appendPart([]byte(typ))

	for _, name := range headers {
		value, ok := findHeader(name)
		appendPart([]byte(name))

		// A flag distinguishes a missing header from an empty one.
		if !ok {
			joined = append(joined, 0)
			continue
		}
		joined = append(joined, 1)
		appendPart(value)
	}
	return joined
}
