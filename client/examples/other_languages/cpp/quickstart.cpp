// Gradients from the service by its protos alone: a unary call, a streamed one, and refusals.
//
//     quickstart localhost:50051 [FILE]
//
// FILE gets the bytes of the gradients. Numbers are little-endian, as this machine's are taken to be.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "npugrad/v1/backward.grpc.pb.h"
#include "npugrad/v1/errors.pb.h"

using namespace npugrad::v1;
using Request = GridSampler2DBackwardRequest;
using Response = GridSampler2DBackwardResponse;
using Stub = BackwardService::Stub;

constexpr size_t kChunkBytes = 1 << 20;
// The `operand` of a chunk: the number of the field in the request, less 2.
constexpr unsigned operand(int field) { return field - 2; }

struct ServiceError : std::runtime_error {  // what errors.proto says: see the fields of ErrorInfo there
  ErrorInfo info;
  BadRequest broken;
  RetryInfo retry;  // the same call may succeed after its retry_delay

  explicit ServiceError(const grpc::Status& status) : std::runtime_error(status.error_message()) {
    ErrorStatus details;  // error_details() is the metadata grpc-status-details-bin
    details.ParseFromString(status.error_details());
    for (const auto& detail : details.details()) {
      read(detail, "ErrorInfo", info) || read(detail, "BadRequest", broken) || read(detail, "RetryInfo", retry);
    }
  }

 private:
  template <typename Message>
  static bool read(const google::protobuf::Any& detail, const std::string& name, Message& message) {
    return detail.type_url() == "type.googleapis.com/google.rpc." + name && message.ParseFromString(detail.value());
  }
};

void set_deadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
}

Response unary(Stub& stub, const Request& request) {
  grpc::ClientContext context;
  set_deadline(context);
  Response response;
  const auto status = stub.GridSampler2DBackward(&context, request, &response);
  if (!status.ok()) throw ServiceError(status);
  return response;
}

Response execute(Stub& stub, const Request& request) {
  grpc::ClientContext context;
  set_deadline(context);
  auto stream = stub.Execute(&context);
  ExecuteRequest frame;  // the header announces each tensor, then the chunks bring them
  Request& header = *frame.mutable_header()->mutable_grid_sampler_2d_backward() = request;
  for (Tensor* tensor : {header.mutable_grad_output(), header.mutable_input(), header.mutable_grid()}) {
    tensor->set_chunked_bytes(tensor->data().size());
  }
  bool open = stream->Write(frame);  // false: the service has refused the call, and Finish says why
  const std::pair<int, const Tensor*> tensors[] = {{Request::kGradOutputFieldNumber, &request.grad_output()},
                                                   {Request::kInputFieldNumber, &request.input()},
                                                   {Request::kGridFieldNumber, &request.grid()}};
  for (const auto& [field, tensor] : tensors) {
    for (size_t offset = 0; open && offset < tensor->data().size(); offset += kChunkBytes) {
      Chunk& chunk = *frame.mutable_chunk();
      chunk.set_operand(operand(field));
      chunk.set_offset(offset);
      chunk.set_data(tensor->data().substr(offset, kChunkBytes));
      open = stream->Write(frame);
    }
  }
  stream->WritesDone();
  Response response;
  for (ExecuteResponse reply; stream->Read(&reply);) {
    if (reply.has_header()) {
      response = reply.header().grid_sampler_2d_backward();
      for (Tensor* tensor : {response.mutable_input_grad(), response.mutable_grid_grad()}) {
        // Small results come in the header.
        if (tensor->has_chunked_bytes()) tensor->set_data(std::string(tensor->chunked_bytes(), '\0'));
      }
    } else {
      const Chunk& chunk = reply.chunk();
      const bool is_input = chunk.operand() == operand(Request::kInputGradFieldNumber);
      Tensor* tensor = is_input ? response.mutable_input_grad() : response.mutable_grid_grad();
      tensor->mutable_data()->replace(chunk.offset(), chunk.data().size(), chunk.data());
    }
  }
  const auto status = stream->Finish();
  if (!status.ok()) throw ServiceError(status);
  return response;
}

Tensor tensor(const std::vector<int64_t>& shape) {
  Tensor made;
  made.mutable_meta()->set_data_type(DATA_TYPE_FLOAT32);
  made.mutable_meta()->mutable_shape()->Assign(shape.begin(), shape.end());
  std::vector<float> numbers(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = i * 37 % 101 / 50.0 - 1;
  made.set_data(numbers.data(), numbers.size() * sizeof(float));
  return made;
}

int main(int count, char** arguments) try {
  if (count < 2) return std::cerr << "quickstart TARGET [FILE]\n", 2;
  grpc::ChannelArguments options;
  options.SetMaxReceiveMessageSize(-1);  // gRPC's own limit is 4 MiB, and a reply may be larger
  const auto stub = BackwardService::NewStub(
      grpc::CreateCustomChannel(arguments[1], grpc::InsecureChannelCredentials(), options));
  Request request;
  *request.mutable_grad_output() = tensor({1, 3, 64, 64});
  *request.mutable_input() = tensor({1, 3, 512, 512});
  *request.mutable_grid() = tensor({1, 64, 64, 2});
  request.set_interpolation_mode(0);
  request.set_padding_mode(0);
  request.set_align_corners(false);
  for (int i = 0; i < 2; ++i) request.mutable_output_mask()->add_values(true);

  const Response whole = unary(*stub, request), streamed = execute(*stub, request);
  const std::string gradients = whole.input_grad().data() + whole.grid_grad().data();
  const bool same = streamed.input_grad().data() + streamed.grid_grad().data() == gradients;
  std::cout << "unary: " << gradients.size() << " bytes from " << whole.info().device() << '\n';
  std::cout << "streamed: " << (same ? "the same bits" : "OTHER BITS") << '\n';
  if (count > 2) std::ofstream(arguments[2], std::ios::binary) << gradients;

  request.set_interpolation_mode(7);
  for (auto* call : {unary, execute}) try {
      call(*stub, request);
    } catch (const ServiceError& error) {
      std::cout << "refused: " << error.info.reason();
      if (error.info.metadata().contains("code")) std::cout << ' ' << error.info.metadata().at("code");
      for (const auto& rule : error.broken.field_violations()) {
        std::cout << ' ' << rule.reason() << ": " << rule.description();
      }
      std::cout << '\n';
    }
  return same ? 0 : 1;
} catch (const ServiceError& error) {
  const std::string& reason = error.info.reason();
  std::cerr << (reason.empty() ? "not from the service" : reason) << ": " << error.what() << '\n';
  return 1;
}
