package sagas_test

import (
	"errors"
	"testing"

	"github.com/google/uuid"

	"github.com/outrelay/outrelay/internal/service/sagas"
)

func TestInvalidIDsAreRejected(t *testing.T) {
	t.Parallel()
	for kind, bad := range map[sagas.Kind][]string{
		sagas.UUID:   {"", "x", uuid.Nil.String()},
		sagas.String: {""},
		sagas.Int32:  {"", "x", "1.0", "2147483648"},
		sagas.Int64:  {"", "9223372036854775808"},
		"float":      {"1"},
	} {
		for _, text := range bad {
			if _, err := sagas.ParseID(kind, text); !errors.Is(err, sagas.ErrNoID) {
				t.Errorf("%s %q: %v", kind, text, err)
			}
		}
	}
}
