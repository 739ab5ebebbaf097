package kafkawire

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
	"github.com/outrelay/outrelay/internal/kafkawire/response"
)

// The requests of this file are not, or not in this version, in kafka-go.
const (
	metadataWithIDs = 10 // the first version of Metadata with topic ids
	epochEndVersion = 3  // of OffsetForLeaderEpoch

	maxRawResponse = 4 << 20 // the metadata of one topic list all brokers and the topic's partitions
	lengthOfUUID   = 16
)

var errRawResponse = errors.New("the response of the broker cannot be read")

// sendRaw sends a request, and returns the number of its response.
func (l *Link) sendRaw(key protocol.ApiKey, version int16, body []byte) (id int32, err error) {
	be := binary.BigEndian
	id = correlation.Add(1)
	req := be.AppendUint16(make([]byte, 4), uint16(key))
	req = be.AppendUint16(req, uint16(version))
	req = be.AppendUint32(req, uint32(id))
	req = append(appendString(req, l.clientID), body...)
	be.PutUint32(req, uint32(len(req)-4))
	_, err = l.conn.Write(req)
	return id, err
}

// callRaw sends a request and returns the body of the response.
func (l *Link) callRaw(key protocol.ApiKey, version int16, body []byte) (*response.Decoder, error) {
	id, err := l.sendRaw(key, version, body)
	if err != nil {
		return nil, err
	}

	raw, err := response.Read(l.reader, nil, id, maxRawResponse)
	return &response.Decoder{B: raw}, err
}

// TopicID returns an id of a topic that is unique among all clusters, from the broker at addr. It is "" if the broker does not
// have topic ids (before Kafka 2.8). A broker that has not received a deletion yet returns the id of the deleted topic. It
// returns the id of the topic whose records it has.
func (c *Client) TopicID(ctx context.Context, addr, topic string) (id string, err error) {
	// One topic by its name: tags of the header, id, name, tags. Then three flags and the tags of the
	// request.
	body := append([]byte{0, 2}, make([]byte, lengthOfUUID)...)
	body = append(binary.AppendUvarint(body, uint64(len(topic)+1)), topic...)
	body = append(body, 0, 0, 0, 0, 0)

	var decoder *response.Decoder
	err = c.useLink(ctx, addr, metaTimeout, func(link *Link) error {
		if link.highest[protocol.Metadata] < metadataWithIDs {
			return nil
		}
		decoder, err = link.callRaw(protocol.Metadata, metadataWithIDs, body)
		return err
	})
	if err == nil && decoder != nil {
		id, err = decodeTopicID(decoder)
	}
	if err != nil {
		return "", fmt.Errorf("reading the id of topic %s: %w", topic, err)
	}
	return id, nil
}

// decodeTopicID decodes a response to Metadata as far as the id of its first topic.
func decodeTopicID(decoder *response.Decoder) (string, error) {
	decoder.SkipTags()
	decoder.Skip(4) // throttle time

	for n := decoder.CompactLength(); n > 0 && !decoder.Bad; n-- {
		decoder.Skip(4) // id of a broker
		decoder.CompactBytes()
		decoder.Skip(4) // port
		decoder.CompactBytes()
		decoder.SkipTags()
	}

	cluster := decoder.CompactBytes()
	decoder.Skip(4) // controller
	topics := decoder.CompactLength()
	code := decoder.Int16()
	decoder.CompactBytes()
	id := decoder.Bytes(lengthOfUUID)

	if decoder.Bad || topics != 1 {
		return "", errRawResponse
	}
	return string(cluster) + "/" + hex.EncodeToString(id), codeError(code)
}

// fetchByID sends a fetch by the ids of the topics, which have the form of TopicID, and returns the response with the names of the topics.
func (l *Link) fetchByID(req *fetch.Request, ids map[string]string) (*fetched.Response, error) {
	be := binary.BigEndian
	// The tags of the header, the replica, and the limits.
	body := be.AppendUint32([]byte{0}, uint32(req.ReplicaID))
	body = be.AppendUint32(be.AppendUint32(body, uint32(req.MaxWaitTime)), uint32(req.MinBytes))
	body = append(be.AppendUint32(body, uint32(req.MaxBytes)), byte(req.IsolationLevel))
	body = be.AppendUint32(be.AppendUint32(body, uint32(req.SessionID)), uint32(req.SessionEpoch))

	names := map[string]string{}
	body = binary.AppendUvarint(body, uint64(len(req.Topics)+1))
	for _, t := range req.Topics {
		_, text, _ := strings.Cut(ids[t.Topic], "/")
		id, err := hex.DecodeString(text)
		if err != nil || len(id) != lengthOfUUID {
			return nil, fmt.Errorf("%q is no id of topic %s", ids[t.Topic], t.Topic)
		}
		names[text] = t.Topic

		body = binary.AppendUvarint(append(body, id...), uint64(len(t.Partitions)+1))
		for _, p := range t.Partitions {
			body = be.AppendUint32(be.AppendUint32(body, uint32(p.Partition)), uint32(p.CurrentLeaderEpoch))
			// The broker does not check the epoch of the last fetched record.
			body = be.AppendUint32(be.AppendUint64(body, uint64(p.FetchOffset)), 0xffffffff)
			body = be.AppendUint32(be.AppendUint64(body, uint64(p.LogStartOffset)), uint32(p.PartitionMaxBytes))
			body = append(body, 0)
		}
		body = append(body, 0)
	}

	// No topics are forgotten, and the request has no tags.
	body = binary.AppendUvarint(append(body, 1), uint64(len(req.RackID)+1))
	body = append(append(body, req.RackID...), 0)
	number, err := l.sendRaw(protocol.Fetch, fetched.WithIDs, body)
	if err != nil {
		return nil, err
	}
	response, err := fetched.Read(l.reader, fetched.WithIDs, number)
	if err != nil {
		return nil, err
	}
	for i := range response.Partitions {
		partition := &response.Partitions[i]
		partition.Topic = names[partition.Topic]
	}
	return response, nil
}

// EpochEnd returns the offset at which a leader epoch of tp ended, from the broker at addr, which leads
// tp (KIP-320). It returns -1 if the broker does not have it.
func (c *Client) EpochEnd(
	ctx context.Context, addr string, tp record.TopicPartition, epoch int32,
) (end int64, err error) {
	// No replica id, and one topic with one partition, whose current leader epoch (-1) is not checked.
	be := binary.BigEndian
	body := be.AppendUint32(be.AppendUint32(nil, 0xffffffff), 1)
	body = be.AppendUint32(appendString(body, tp.Topic), 1)
	body = be.AppendUint32(body, uint32(tp.Partition))
	body = be.AppendUint32(be.AppendUint32(body, 0xffffffff), uint32(epoch))

	var decoder *response.Decoder
	err = c.useLink(ctx, addr, adminTimeout, func(link *Link) error {
		if link.highest[protocol.OffsetForLeaderEpoch] < epochEndVersion {
			return nil
		}
		decoder, err = link.callRaw(protocol.OffsetForLeaderEpoch, epochEndVersion, body)
		return err
	})
	if err != nil || decoder == nil {
		return -1, err
	}

	decoder.Skip(4) // throttle time
	topics := decoder.Int32()
	decoder.Bytes(int(decoder.Int16()))
	partitions := decoder.Int32()
	code := decoder.Int16()
	decoder.Skip(8) // partition and epoch
	end = decoder.Int64()
	if decoder.Bad || topics != 1 || partitions != 1 {
		return -1, errRawResponse
	}
	return end, codeError(code)
}
