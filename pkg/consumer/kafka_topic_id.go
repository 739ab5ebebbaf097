package consumer

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/metadata"
)

const (
	apiMetadata        = 3
	apiVersions        = 18
	metadataWithIDs    = 10      // the first version of Metadata that has topic ids
	maxMetadataAnswer  = 4 << 20 // bytes of an answer about one topic: it lists all brokers and the topic's partitions
	lengthOfUUID       = 16
	clientOfTopicIDs   = "outrelay"
	lengthOfAPIVersion = 6
)

// errAnswer says that a broker's answer is not one to the request.
var errAnswer = errors.New("the broker's answer cannot be read")

// topicIDs asks for the id of one topic. kafka-go knows no version of Metadata that has it.
type topicIDs struct {
	metadata.Request
	topic string
}

// topicID is the answer: of the cluster and of the topic, "" if the broker does not know topic ids.
type topicID struct {
	metadata.Response
	id string
}

// topicID returns the id of a topic among those of all clusters; "" if the broker is too old to say (before Kafka 2.8).
func (g *generation) topicID(ctx context.Context, topic string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	m, err := g.fetches.RoundTrip(ctx, g.addr, &topicIDs{topic: topic})
	if err != nil {
		return "", fmt.Errorf("asking for the id of topic %s: %w", topic, err)
	}
	answer, ok := m.(*topicID)
	if !ok {
		return "", errAnswer
	}
	return answer.id, nil
}

// Required makes kafka-go leave the exchange to RawExchange.
func (*topicIDs) Required(map[protocol.ApiKey]int16) bool { return true }

// RawExchange asks which versions the broker supports, and then for the topic.
func (x *topicIDs) RawExchange(rw io.ReadWriter) (protocol.Message, error) {
	versions, err := call(rw, apiVersions, 0, nil)
	if err != nil {
		return nil, err
	}
	if !supports(versions, apiMetadata, metadataWithIDs) {
		return &topicID{}, nil
	}

	// One topic by its name: id, name, tags. Then three flags and the tags of the request.
	body := append([]byte{0, 2}, make([]byte, lengthOfUUID)...)
	body = append(binary.AppendUvarint(body, uint64(len(x.topic)+1)), x.topic...)
	body = append(body, 0, 0, 0, 0, 0)
	answer, err := call(rw, apiMetadata, metadataWithIDs, body)
	if err != nil {
		return nil, err
	}
	return parseTopicID(answer)
}

// call sends one request and returns the body of its answer, of bounded length. A nil body is of a version without tags.
func call(rw io.ReadWriter, api, version int16, body []byte) ([]byte, error) {
	id := correlation.Add(1)
	req := binary.BigEndian.AppendUint16(make([]byte, 4), uint16(api))
	req = binary.BigEndian.AppendUint16(req, uint16(version))
	req = binary.BigEndian.AppendUint32(req, uint32(id))
	req = binary.BigEndian.AppendUint16(req, uint16(len(clientOfTopicIDs)))
	req = append(append(req, clientOfTopicIDs...), body...)
	binary.BigEndian.PutUint32(req, uint32(len(req)-4))
	if _, err := rw.Write(req); err != nil {
		return nil, err
	}

	var head [8]byte
	if _, err := io.ReadFull(rw, head[:]); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(head[:])
	if size < 4 || size > maxMetadataAnswer || binary.BigEndian.Uint32(head[4:]) != uint32(id) {
		return nil, errAnswer
	}
	answer := make([]byte, size-4)
	_, err := io.ReadFull(rw, answer)
	return answer, err
}

// supports reads the answer to ApiVersions v0: an error code and a list of (api, lowest, highest).
func supports(answer []byte, api, version int16) bool {
	r := wire{b: answer}
	r.take(2)
	for range min(int(r.u32()), len(r.b)/lengthOfAPIVersion) {
		key, lowest, highest := int16(r.u16()), int16(r.u16()), int16(r.u16())
		if key == api {
			return lowest <= version && version <= highest
		}
	}
	return false
}

// parseTopicID reads the answer to Metadata v10 as far as the id of its first topic.
func parseTopicID(answer []byte) (*topicID, error) {
	r := wire{b: answer}
	r.tags()
	r.u32() // throttle time
	for n := r.length(); n > 0 && !r.bad; n-- {
		r.u32() // id, host, port, rack
		r.text()
		r.u32()
		r.text()
		r.tags()
	}
	cluster := r.text()
	r.u32() // controller
	topics := r.length()
	code := kafka.Error(int16(r.u16()))
	r.text()
	id := r.take(lengthOfUUID)
	switch {
	case r.bad || topics != 1:
		return nil, errAnswer
	case code != 0:
		return nil, code
	}
	return &topicID{id: string(cluster) + "/" + hex.EncodeToString(id)}, nil
}

// wire reads what a broker sent. Beyond the end everything is zero and bad is set.
type wire struct {
	b   []byte
	bad bool
}

func (r *wire) take(n int) []byte {
	if n < 0 || n > len(r.b) {
		r.b, r.bad = nil, true
		return make([]byte, min(max(n, 0), lengthOfUUID))
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *wire) u16() uint16 { return binary.BigEndian.Uint16(r.take(2)) }
func (r *wire) u32() uint32 { return binary.BigEndian.Uint32(r.take(4)) }

func (r *wire) uvarint() int {
	n, size := binary.Uvarint(r.b)
	if size <= 0 || n > uint64(len(r.b)) {
		r.b, r.bad = nil, true
		return 0
	}
	r.b = r.b[size:]
	return int(n)
}

// length is that of a compact array or string, one less than the number that stands for it; 0 for null.
func (r *wire) length() int { return max(r.uvarint()-1, 0) }

func (r *wire) text() []byte { return r.take(r.length()) }

func (r *wire) tags() {
	for n := r.uvarint(); n > 0 && !r.bad; n-- {
		r.uvarint()
		r.take(r.uvarint())
	}
}
