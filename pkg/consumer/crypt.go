package consumer

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/outrelay/outrelay/pkg/event"
)

// Keys gives the keys of payload encryption. Keys are 16, 24 or 32 bytes (AES-128, -192, -256). Its methods are called for
// each message: a provider that asks a service keeps what it was told.
type Keys interface {
	// Current is the key to encrypt with, and its id.
	Current(ctx context.Context) (id string, key []byte, err error)
	// Key is the key of an id that was current once. ErrUnknownKey says that there is none.
	Key(ctx context.Context, id string) ([]byte, error)
}

// ErrUnknownKey says that a key provider has no key of that id. A message that names one is invalid.
var ErrUnknownKey = errors.New("unknown encryption key")

// StaticKeys are Keys that are known from the start. To rotate, add a key everywhere, then make it the current one, and
// remove the old one when nothing that it encrypted can come any more.
func StaticKeys(current string, keys map[string][]byte) (Keys, error) {
	s := staticKeys{current, make(map[string][]byte, len(keys))}
	for id, k := range maps.All(keys) {
		if id == "" || strings.Contains(id, ";") || len(id) > 255 {
			return nil, fmt.Errorf("%w: %q is no id of a key: 1 to 255 bytes without a semicolon", ErrConfiguration, id)
		}
		if _, err := aes.NewCipher(k); err != nil {
			return nil, fmt.Errorf("%w: encryption key %q has %d bytes; 16, 24 or 32 are allowed", ErrConfiguration, id, len(k))
		}
		s.keys[id] = append([]byte(nil), k...)
	}
	if s.keys[current] == nil {
		return nil, fmt.Errorf("%w: the current encryption key %q is not among the keys", ErrConfiguration, current)
	}
	return s, nil
}

type staticKeys struct {
	current string
	keys    map[string][]byte
}

func (s staticKeys) Current(context.Context) (string, []byte, error) {
	return s.current, s.keys[s.current], nil
}

func (s staticKeys) Key(_ context.Context, id string) ([]byte, error) {
	if k, ok := s.keys[id]; ok {
		return k, nil
	}
	return nil, fmt.Errorf("%w %q", ErrUnknownKey, id)
}

// cryptVersion begins the header: version, algorithm, id of the key, and the names of authenticated headers.
const cryptVersion = "1;aes-gcm"

// Encrypt encrypts the payloads of events with AES-GCM before they are stored: the outbox, Kafka, retry topics and dead
// letters hold the encrypted body, and only a handler inside of Decrypt sees the plain one. Authenticated with it are the
// event's id, its type, and those of its headers that are named, so that none of them can be exchanged on the way. The key
// of a record, its headers and its type stay readable. Tombstones have nothing to encrypt and pass.
//
// The body grows by 28 bytes. Each event has a random nonce; a key is good for 2³² events.
func Encrypt(keys Keys, headers ...string) EmitMiddleware {
	return func(next Emit) Emit {
		return func(ctx context.Context, ev event.Event) error {
			body, err := ev.Payload()
			if err != nil {
				return err
			}
			if body == nil || ev.HasHeader(headerEncryption) {
				return next(ctx, ev)
			}
			id, key, err := keys.Current(ctx)
			if err != nil {
				return fmt.Errorf("encrypting event %s: %w", ev.ID(), err)
			}
			aead, err := newGCM(key)
			if err != nil {
				return fmt.Errorf("encrypting event %s: %w", ev.ID(), err)
			}
			head := strings.Join(append([]string{cryptVersion, id}, headers...), ";")
			find := func(name string) ([]byte, bool) { return eventHeader(ev, name) }
			aad := authenticatedData(head, ev.ID().String(), ev.Type(), headers, find)
			nonce := make([]byte, aead.NonceSize(), aead.NonceSize()+len(body)+aead.Overhead())
			if _, err := rand.Read(nonce); err != nil {
				return fmt.Errorf("encrypting event %s: %w", ev.ID(), err)
			}
			return next(ctx, ev.With(
				event.WithPayload(aead.Seal(nonce, nonce, body, aad)),
				event.WithHeader(headerEncryption, []byte(head)),
				event.WithHeader(headerEncryptedType, []byte(ev.Type())),
			))
		}
	}
}

// Decrypt is the other side of Encrypt. A message that is not what was encrypted is an *InvalidError and never handled;
// neither is one that was not encrypted at all, unless AllowPlain. The message that it hands on is a copy.
func Decrypt(keys Keys, opts ...DecryptOption) Middleware {
	var s decryptSettings
	for _, o := range opts {
		o(&s)
	}
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			head, ok := m.Header(headerEncryption)
			if !ok {
				if s.plain || m.Tombstone() {
					return next.Handle(ctx, m)
				}
				return newDecryptError(m, errors.New("it is not encrypted"))
			}
			body, err := decryptBody(ctx, keys, string(head), m)
			if err != nil {
				return err
			}
			c := m.Copy()
			c.Value = body
			c.DeleteHeader(headerEncryption)
			c.DeleteHeader(headerEncryptedType)
			return next.Handle(ctx, c)
		})
	}
}

// DecryptOption configures Decrypt.
type DecryptOption func(*decryptSettings)

type decryptSettings struct{ plain bool }

// AllowPlain lets messages pass that are not encrypted, while a topic has both.
func AllowPlain() DecryptOption { return func(s *decryptSettings) { s.plain = true } }

func decryptBody(ctx context.Context, keys Keys, head string, m *Message) ([]byte, error) {
	parts := strings.Split(head, ";")
	if len(parts) < 3 || strings.Join(parts[:2], ";") != cryptVersion {
		return nil, newDecryptError(m, errors.New("its encryption is of an unknown kind"))
	}
	key, err := keys.Key(ctx, parts[2])
	switch {
	case errors.Is(err, ErrUnknownKey):
		return nil, newDecryptError(m, err)
	case err != nil:
		return nil, fmt.Errorf("decrypting message %s: %w", m.ID, err) // the provider is away: worth another attempt
	}
	aead, err := newGCM(key)
	if err != nil {
		return nil, fmt.Errorf("decrypting message %s: %w", m.ID, err)
	}
	typ, _ := m.Header(headerEncryptedType)
	if m.Type != "" && m.Type != string(typ) {
		return nil, newDecryptError(m, errors.New("it was encrypted as another type"))
	}
	n := aead.NonceSize()
	if len(m.Value) < n {
		return nil, newDecryptError(m, errors.New("its body is too short"))
	}
	body, err := aead.Open([]byte{}, m.Value[:n], m.Value[n:], authenticatedData(head, m.ID, string(typ), parts[3:], m.Header))
	if err != nil {
		return nil, newDecryptError(m, errors.New("its body or a header was changed, or the key is another one"))
	}
	return body, nil
}

func newDecryptError(m *Message, err error) error {
	return &InvalidError{ID: m.ID, Type: m.Type, Problems: []string{"decryption: " + err.Error()}, Err: err}
}

func newGCM(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// authenticatedData is what is bound to the body. Every part is preceded by its length, so that no two lists are the same bytes.
func authenticatedData(head, id, typ string, headers []string, find func(string) ([]byte, bool)) []byte {
	var b []byte
	add := func(s []byte) { b = append(binary.AppendUvarint(b, uint64(len(s))), s...) }
	add([]byte(head))
	add([]byte(id))
	add([]byte(typ))
	for _, name := range headers {
		v, ok := find(name)
		add([]byte(name))
		if !ok {
			b = append(b, 0) // absent is not empty
			continue
		}
		b = append(b, 1)
		add(v)
	}
	return b
}

func eventHeader(ev event.Event, name string) ([]byte, bool) {
	for _, h := range ev.Headers() {
		if h.Key == name {
			return h.Value, true
		}
	}
	return nil, false
}
