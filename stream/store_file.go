package stream

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/hopback/hopback/argument"
)

// FileStore stores each position in a file. Use it for a single process with a disk. Save writes
// another file, syncs it, and renames it, so a crash leaves either the old position or the new
// one. Save returns when the disk has it. It is safe for concurrent use by different consumers
// and streams.
type FileStore struct {
	// Dir is an existing directory. The file names are a hash followed by ".offset", or by ".mark" for
	// marks. The files contain JSON with the consumer, the stream, and the position. Required.
	Dir string
}

var _ MarkStore = (*FileStore)(nil)

type positionFile struct {
	Consumer string `json:"consumer"`
	Stream   string `json:"stream"`
	Next     uint64 `json:"next"`
	Mark     string `json:"mark,omitempty"`
}

func (s *FileStore) path(consumer, stream, kind string) (string, error) {
	if s == nil || s.Dir == "" {
		return "", argument.New("FileStore.Dir", nil, "is empty", "set it to an existing directory")
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%d:%s%s", len(consumer), consumer, stream))
	return filepath.Join(s.Dir, hex.EncodeToString(sum[:])+kind), nil
}

// Kinds of files.
const (
	fileOffset = ".offset"
	fileMark   = ".mark"
)

// Load reads the position. A file that can't be read is an error, so the consumer doesn't start
// from the beginning.
func (s *FileStore) Load(_ context.Context, consumer, stream string) (uint64, bool, error) {
	p, found, err := s.read(consumer, stream, fileOffset)
	return p.Next, found, err
}

// LoadMark reads the mark, which has a separate file.
func (s *FileStore) LoadMark(_ context.Context, consumer, stream string) (string, error) {
	p, _, err := s.read(consumer, stream, fileMark)
	return p.Mark, err
}

func (s *FileStore) read(consumer, stream, kind string) (p positionFile, found bool, err error) {
	path, err := s.path(consumer, stream, kind)
	if err != nil {
		return p, false, err
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		_, err := os.Stat(s.Dir)
		return p, false, err
	}
	if err != nil {
		return p, false, err
	}
	var read positionFile
	if err := json.Unmarshal(b, &read); err != nil {
		return p, false, fmt.Errorf("%s: %w", path, err)
	}
	if read.Consumer != consumer || read.Stream != stream {
		return p, false, fmt.Errorf("%s belongs to consumer %q and stream %q", path, read.Consumer, read.Stream)
	}
	return read, true, nil
}

// Save writes the position.
func (s *FileStore) Save(_ context.Context, consumer, stream string, next uint64) error {
	return s.write(positionFile{Consumer: consumer, Stream: stream, Next: next}, fileOffset)
}

// SaveMark writes the mark.
func (s *FileStore) SaveMark(_ context.Context, consumer, stream, mark string) error {
	return s.write(positionFile{Consumer: consumer, Stream: stream, Mark: mark}, fileMark)
}

func (s *FileStore) write(p positionFile, kind string) error {
	path, err := s.path(p.Consumer, p.Stream, kind)
	if err != nil {
		return err
	}
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if err := writeSynced(path+".tmp", append(b, '\n')); err != nil {
		return err
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		return err
	}
	return syncDir(s.Dir)
}

// Delete deletes the position and the mark, so that the consumer starts at Config.From again.
func (s *FileStore) Delete(_ context.Context, consumer, stream string) error {
	for _, kind := range []string{fileMark, fileOffset} {
		path, err := s.path(consumer, stream, kind)
		if err != nil {
			return err
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return syncDir(s.Dir)
}

func writeSynced(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// syncDir makes a rename last.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
