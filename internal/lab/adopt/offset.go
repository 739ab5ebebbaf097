package adopt

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/resume"
)

// The publishers whose offsets can be adopted.
const (
	Debezium   = "debezium"    // Debezium's MongoDB connector
	mongoKafka = "mongo-kafka" // the MongoDB Kafka source connector
)

// rawOffset is an entry of an offset store of Kafka Connect.
type rawOffset struct{ key, value []byte }

// connectorOffset is the position of one connector.
type connectorOffset struct {
	Connector string          // name of the connector
	Kind      string          // Debezium or mongoKafka
	Partition string          // the source as the connector names it
	Position  resume.Position // after the last event that Connect has stored as sent
}

// ErrRejected matches each rejection of a position. Nothing was written.
var ErrRejected = errors.New("no position was adopted")

func rejectionf(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrRejected, fmt.Errorf(format, args...))
}

// selectOffset returns the offset of the named connector, or of the only connector for MongoDB if connector is "".
func selectOffset(list []rawOffset, connector string) (connectorOffset, error) {
	found := map[string][]rawOffset{}
	others := map[string]bool{}
	for _, raw := range list {
		name, partition, ok := parseKey(raw.key)
		switch {
		case !ok:
			others[clip(string(raw.key))] = true
		case connector != "" && name != connector, kindOf(partition) == "":
			others[name+" "+describe(partition)] = true
		case raw.value != nil:
			found[name] = append(found[name], raw)
		}
	}

	// The message names the entries that were found, because the connector's name is often misspelled.
	if len(found) == 0 {
		want := "an offset of a connector for MongoDB"
		if connector != "" {
			want = fmt.Sprintf("an offset of the connector %q for MongoDB", connector)
		}
		actual := "no entry"
		if len(others) > 0 {
			actual = strings.Join(slices.Sorted(maps.Keys(others)), "; ")
		}
		return connectorOffset{}, rejectionf(`expected %s, with {"server_id": …} (Debezium) or {"ns": …} (MongoDB Kafka connector); found %s`, want, actual)
	}
	if len(found) > 1 {
		return connectorOffset{}, rejectionf("found the offsets of %s; select one with --connector", strings.Join(slices.Sorted(maps.Keys(found)), ", "))
	}

	for name, entries := range found {
		// Debezium keeps the entries of replica sets that it wrote before version 2 and consolidated.
		var newest connectorOffset
		for i, raw := range entries {
			offset, err := parseOffset(name, raw)
			if err != nil {
				return connectorOffset{}, err
			}
			if i == 0 || offset.Position.Compare(newest.Position) > 0 {
				newest = offset
			}
		}
		return newest, nil
	}
	return connectorOffset{}, nil
}

// parseKey parses the key of an entry: ["connector", {partition}].
func parseKey(key []byte) (connector string, partition map[string]any, ok bool) {
	var parts []json.RawMessage
	if json.Unmarshal(key, &parts) != nil || len(parts) != 2 {
		return "", nil, false
	}
	ok = json.Unmarshal(parts[0], &connector) == nil && json.Unmarshal(parts[1], &partition) == nil
	return connector, partition, ok
}

// kindOf returns the kind of connector that uses such partitions, or "".
func kindOf(partition map[string]any) string {
	if _, ok := partition["server_id"].(string); ok {
		return Debezium
	}
	if _, ok := partition["ns"].(string); ok && len(partition) == 1 {
		return mongoKafka
	}
	return ""
}

func describe(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		return "?"
	}
	return clip(string(text))
}

func clip(text string) string { return record.Shorten(text, 200) }

// parseOffset parses the entry of a connector for MongoDB.
func parseOffset(connector string, raw rawOffset) (connectorOffset, error) {
	_, partition, _ := parseKey(raw.key)
	offset := connectorOffset{Connector: connector, Kind: kindOf(partition), Partition: describe(partition)}
	if ns, ok := partition["ns"].(string); ok {
		offset.Partition = ns
	}

	decoder := json.NewDecoder(strings.NewReader(string(raw.value)))
	// Counters and times are larger than the integers of a double.
	decoder.UseNumber()
	var value map[string]any
	if err := decoder.Decode(&value); err != nil {
		return offset, rejectionf("the offset of %s is not a JSON object: %s", connector, clip(string(raw.value)))
	}

	var err error
	if offset.Kind == Debezium {
		offset.Position, err = debeziumPosition(value)
	} else {
		offset.Position, err = mongoKafkaPosition(value)
	}
	if err != nil {
		return offset, rejectionf("connector %s: %w", connector, err)
	}
	return offset, nil
}

// debeziumPosition reads {"sec": …, "ord": …, "resume_token": …}. Since version 2.2 the token is BSON in base64, before it was its
// hexadecimal data.
func debeziumPosition(value map[string]any) (resume.Position, error) {
	if isTrue(value["initsync"]) {
		return resume.Position{}, errors.New("its snapshot is not finished (initsync), so it has no position in the stream; " +
			"let it finish, or adopt a time with --at")
	}
	if text, ok := value["resume_token"].(string); ok && text != "" {
		return parseToken(text)
	}

	sec, ord := parseNumber(value["sec"]), parseNumber(value["ord"])
	if sec <= 0 {
		return resume.Position{}, fmt.Errorf(`expected "sec", "ord" and "resume_token"; found %s`, describe(value))
	}
	return resume.Position{ClusterTime: bson.Timestamp{T: uint32(sec), I: uint32(ord)}}, nil
}

// mongoKafkaPosition reads {"_id": "{\"_data\": …}"}.
func mongoKafkaPosition(value map[string]any) (resume.Position, error) {
	if isTrue(value["copy"]) {
		return resume.Position{}, errors.New("it is copying the collection (copy), so it has no position in the stream; " +
			"let it finish, or adopt a time with --at")
	}
	text, ok := value["_id"].(string)
	if !ok {
		return resume.Position{}, fmt.Errorf(`expected "_id" with a resume token; found %s`, describe(value))
	}
	return parseToken(text)
}

func isTrue(value any) bool { return value == true || value == "true" }

func parseNumber(value any) int64 {
	n, err := strconv.ParseInt(fmt.Sprint(value), 10, 64)
	if err != nil || n > 1<<32-1 {
		return 0
	}
	return n
}

// parseToken parses a resume token: its document as JSON, its hexadecimal `_data`, or its document as BSON in base64.
func parseToken(text string) (resume.Position, error) {
	token := resume.Token(nil)
	text = strings.TrimSpace(text)
	if strings.HasPrefix(text, "{") {
		var doc struct {
			Data string `json:"_data"`
		}
		if err := json.Unmarshal([]byte(text), &doc); err == nil {
			token = resume.TokenOf(doc.Data)
		}
	} else if raw, err := base64.StdEncoding.DecodeString(text); err == nil && bson.Raw(raw).Validate() == nil {
		// A token in hexadecimal is valid base64 too, so the decoded bytes must be a document.
		token = resume.Token(raw)
	} else {
		token = resume.TokenOf(strings.ToUpper(text))
	}

	at, ok := token.ClusterTime()
	if !ok {
		return resume.Position{}, fmt.Errorf(
			`expected a resume token such as {"_data": "82…"}, its data, or its BSON in base64; found %s`, clip(text))
	}
	return resume.Position{Token: token, ClusterTime: at}, nil
}
