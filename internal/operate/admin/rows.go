package admin

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// nameRow returns the name of a row of a list: its store and its key there, as a JSON array. Equal ids of two outboxes, handlers or
// deliveries are different rows, so actions take this name as an id. It is no id itself, because MongoDB allows no array as an id.
func nameRow(store string, key any) string {
	text, err := json.Marshal([]any{store, key})
	if err != nil {
		// The keys are strings and structs of strings and numbers.
		panic(fmt.Sprintf("naming a row of %s: %v", store, err))
	}
	return string(text)
}

// parseRow returns the store and the key of the row that text names, or false if text is an id.
func parseRow[K any](text string) (store string, key K, ok bool) {
	var parts []json.RawMessage
	if json.Unmarshal([]byte(text), &parts) != nil || len(parts) != 2 {
		return "", key, false
	}
	ok = json.Unmarshal(parts[0], &store) == nil && store != "" && json.Unmarshal(parts[1], &key) == nil
	return store, key, ok
}

// ShowRow returns the id of the entry that text names, for people. An id stays as it is.
func ShowRow(text string) string {
	if _, id, isRow := parseRow[string](text); isRow {
		return id
	}
	return text
}

// splitRows returns the ids of a list that also names rows, and the keys of its rows in store. Without any id and row in store, ids is empty
// and not nil, because an empty list selects nothing. Nil stays nil.
func splitRows[K any](list []string, store string) (ids []string, keys []K) {
	for _, text := range list {
		in, key, isRow := parseRow[K](text)
		switch {
		case !isRow:
			ids = append(ids, text)
		case in == store:
			keys = append(keys, key)
		}
	}

	if list != nil && ids == nil && keys == nil {
		ids = []string{}
	}
	return ids, keys
}

// digest is the id of a stored document, as the key of a row.
type digest [16]byte

// MarshalText returns the digits of the digest.
func (d digest) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, d[:]), nil }

// UnmarshalText reads the digits of a digest.
func (d *digest) UnmarshalText(text []byte) error {
	data, err := hex.DecodeString(string(text))
	if err != nil || len(data) != len(d) {
		return fmt.Errorf("%q has not the digits of %d bytes", text, len(d))
	}
	copy(d[:], data)
	return nil
}
